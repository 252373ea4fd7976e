"""The command line of the launchers: `--config=experiments/x.py:arg --config.group.field=value`.

Whatever it says wrong is answered in a line, exit code 2, before JAX is imported, which takes seconds: nothing heavy is
imported here, nor by the launchers before their `main` is called.
"""

import argparse
import difflib
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import ml_collections
import rich.console
from absl import app, flags, logging
from ml_collections import config_flags

from launch import output, usage
from research import errors, exits
from research.errors import ConfigError
from research.runs import files, login
from research.settings import fields
from research.settings.config import Settings, is_idle, read
from research.sweeps import experiment

_TARGET = re.compile(r"--?config(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"--?(no)?config\.([^=]*)(?:=(.*))?", re.DOTALL)
_HELP = {"-h", "-help", "--help", "-?", "--helpshort", "--helpfull"}


def define_config() -> None:
    """Defines `--config`, and `--preset` beside it, unless another launcher of this process has."""
    if "config" in flags.FLAGS:
        return
    config_flags.DEFINE_config_file(
        "config", help_string="the experiment: experiments/NAME.py or experiments/NAME.py:ARG"
    )
    flags.DEFINE_string("preset", "", "overrides saved under that name by a search; the command line's win")


def run(main: Callable[[], int], *, config_required: bool = True, check: Callable[[], object] = lambda: None) -> None:
    """Parses the command line, exits with what `main` returns, and reports foreseen errors in a line.

    Without arguments the launcher's own description is the answer, and to `--help` all flags, experiments and fields.
    Where the launcher has a flag `--point`, it stands for the overrides of that point of the experiment's sweep.

    Args:
      main: does the work, and returns the exit code.
      config_required: whether there must be a `--config`, if the launcher has that flag.
      check: raises ConfigError where flags say nothing together; called before JAX is imported.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return _parse(argv, config_required)
        except Exception as error:
            _report(error)

    def guarded(argv: Sequence[str]) -> None:
        del argv
        logging.set_verbosity(logging.FATAL)  # orbax tells at length what it also raises
        warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
        try:
            check()
            if given():
                _check_login()
            _prepare_jax()
            sys.exit(main())
        except KeyboardInterrupt:
            _report(errors.InterruptedRunError("SIGINT before anything was done that could be saved"))
        except Exception as error:
            _report(error)

    output.make_patient()
    app.run(guarded, flags_parser=parse)


def given() -> bool:
    """Whether there is a `--config`."""
    return "config" in flags.FLAGS and flags.FLAGS.config is not None


def target() -> str:
    """The experiment and its argument, as given: `experiments/x.py:arg`."""
    return config_flags.get_config_filename(flags.FLAGS["config"])


def config() -> ml_collections.ConfigDict:
    """The experiment's config with the preset's and the command line's overrides."""
    chosen = flags.FLAGS.config
    if flags.FLAGS.preset:
        fields.override(chosen, overrides())
    return chosen


def settings() -> Settings:
    """The settings of `config`, those of one run.

    Raises:
      ConfigError: a value is not allowed, or an override has no effect beside the other settings.
    """
    made = read(config())
    if not flags.FLAGS.point:  # whose other overrides are for all points
        made.refuse_idle(overrides())
    return made


def common_settings() -> Settings:
    """What all points of a sweep share, such as `run` and `wandb`, whatever layers they have.

    Raises:
      ConfigError: a value is not allowed.
    """
    chosen, layers = experiment.config(target()), config().model.layers
    fields.override(chosen, {name: value for name, value in overrides().items() if not is_idle(name, layers)})
    return read(chosen)


def overrides() -> fields.Overrides:
    """The preset's and the command line's overrides by dotted name."""
    given = config_flags.get_override_values(flags.FLAGS["config"])
    return _preset(flags.FLAGS.config.run.root, flags.FLAGS.preset) | given


def save_preset(root: str, name: str, settings: fields.Overrides) -> pathlib.Path:
    """Saves overrides for `--preset=NAME`, and returns the file."""
    path = _preset_path(root, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, settings)
    return path


def _preset(root: str, name: str) -> fields.Overrides:
    if not name:
        return {}
    path = _preset_path(root, name)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.json"))) or "none"
        raise ConfigError(f"--preset={name}: no {path}; there are {known}")
    settings = files.read_json(path)
    return {name: tuple(setting) if isinstance(setting, list) else setting for name, setting in settings.items()}


def _preset_path(root: str, name: str) -> pathlib.Path:
    return pathlib.Path(root).expanduser() / "presets" / f"{name}.json"


class Line(NamedTuple):
    """A command line's arguments.

    Attributes:
      target: of `--config`, None without it.
      config: the experiment's, without overrides; None without `--config`.
      overrides: of the command line alone.
      rest: the other arguments.
    """

    target: str | None
    config: ml_collections.ConfigDict | None
    overrides: fields.Overrides
    rest: list[str]


def read_line(arguments: Sequence[str]) -> Line:
    """Reads `--config` and overrides, wherever they stand.

    Raises:
      ConfigError: the experiment, its argument or a field does not exist, or a value is not one of the field's type.
    """
    chosen = _last_target(arguments)
    if chosen is None:
        return Line(None, None, {}, list(arguments))
    config = experiment.config(chosen)
    overrides, rest, texts = {}, [], iter(arguments)
    for argument in texts:
        if match := _TARGET.fullmatch(argument):
            if match[1] is None:
                next(texts, None)
        elif match := _OVERRIDE.fullmatch(argument):
            negated, name, text = match.groups()
            fields.check_name(config, name)
            switch = isinstance(fields.value(config, name), bool)
            if negated and not switch:
                raise ConfigError(f"{argument}: config.{name} is no switch; write --config.{name}=VALUE")
            if text is None:
                text = str(not negated) if switch else next(texts, "")
            overrides.pop(name, None)  # the last one counts, and its place
            overrides[name] = fields.from_text(config, name, text)
        else:
            rest.append(argument)
    return Line(chosen, config, overrides, rest)


def canonical(line: Line, *, takes_point: bool = False) -> list[str]:
    """The arguments as absl and config_flags take them: the file's path, and overrides in one form.

    `takes_point`: whether `--point=LABEL` stands for overrides.

    Raises:
      ConfigError: as `expand`.
    """
    if line.target is None:
        return line.rest
    overrides, rest = line.overrides, line.rest
    if takes_point:
        label, rest = _take("point", rest)
        overrides = expand(line, label) if label else overrides
    return [f"--config={experiment.located(line.target)}", *experiment.as_flags(overrides), *rest]


def expand(line: Line, label: str) -> fields.Overrides:
    """The overrides with those that `--point=LABEL` stands for.

    Raises:
      ConfigError: there is no such point, or an argument or the preset has another value of a field of the sweep's.
    """
    preset, _ = _take("preset", line.rest)
    common = _preset(line.overrides.get("run.root", line.config.run.root), preset or "") | line.overrides
    return line.overrides | experiment.point(line.target, label, common)


def _last_target(arguments: Sequence[str]) -> str | None:
    found = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if match := _TARGET.fullmatch(argument):
            found = following if match[1] is None else match[1]
    return found


def _take(name: str, arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of the flag, None where it is not given, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(f"--{name}", f"-{name}")
    try:
        known, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"--{name}: {error.message}") from error
    return getattr(known, name), rest


def _parse(argv: Sequence[str], config_required: bool) -> list[str]:
    program, *arguments = argv
    if not arguments:
        usage.show_short(rich.console.Console(stderr=True))
        sys.exit(exits.INVALID)
    takes_config = "config" in flags.FLAGS
    line = read_line(arguments) if takes_config else Line(None, None, {}, arguments)
    if _HELP & set(line.rest):
        usage.show_whole(rich.console.Console(), line.config)
        sys.exit(exits.FINISHED)
    sys.argv = [program, *canonical(line, takes_point="point" in flags.FLAGS)]  # where config_flags looks for overrides
    try:
        unparsed = flags.FLAGS(sys.argv)
    except flags.UnrecognizedFlagError as error:
        raise ConfigError(_unknown(error.flagname, arguments)) from error
    except flags.Error as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if unparsed[1:]:
        raise ConfigError(f"{' '.join(unparsed[1:])}: unexpected; overrides are written --config.group.field=value")
    if config_required and takes_config and line.config is None:
        raise ConfigError("--config: is missing; must be experiments/NAME.py or experiments/NAME.py:ARG, see --help")
    return unparsed


def _unknown(name: str, arguments: Sequence[str]) -> str:
    """What is said of a flag that does not exist: which field or flag may have been meant."""
    if "config" in flags.FLAGS:
        if name.startswith("config."):
            return f"--{name}: has no effect without --config"
        if meant := fields.nearest(name, 1, 0.8):
            values = [
                argument.partition("=")[2] for argument in arguments if argument.lstrip("-").startswith(f"{name}=")
            ]
            return f"--{name}: no such flag; fields are written --config.{meant[0]}={values[0] if values else 'VALUE'}"
    known = [known for known in flags.FLAGS if "." not in known]
    meant = " or ".join(f"--{flag}" for flag in difflib.get_close_matches(name, known, 2, 0.6))
    return f"--{name}: no such flag; {f'did you mean {meant}? ' if meant else ''}--help shows all"


def _check_login() -> None:
    """Raises ConfigError where wandb cannot record as asked; a process of several may leave that to the first."""
    if not config().distributed.coordinator:
        login.check(config().wandb.mode)


def _prepare_jax() -> None:
    from research.devices import ignore_absent_tpu
    from research.validation import check_precision

    ignore_absent_tpu()
    check_precision()


def _report(error: Exception) -> NoReturn:
    """Prints a foreseen error and exits; raises any other."""
    kind = errors.kind(error)
    if kind == errors.OTHER:
        raise error
    print(f"{kind}: {error}", file=sys.stderr)
    codes = dict.fromkeys((errors.INVALID, errors.UNSUPPORTED, errors.IN_USE), exits.INVALID)
    codes[errors.INTERRUPTED] = exits.INTERRUPTED
    sys.exit(codes.get(kind, exits.FAILED))
