"""The `--config` flag of the launchers: `--config=experiments/x.py:arg --config.group.field=value`."""

import argparse
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Sequence

import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from research import errors, exits
from research.devices import ignore_absent_tpu
from research.errors import ConfigError
from research.runs import files
from research.settings import fields
from research.sweeps import experiment
from research.validation import check_precision

_CONFIG = config_flags.DEFINE_config_file("config", help_string="experiments/NAME.py or experiments/NAME.py:ARG")

_PRESET = flags.DEFINE_string("preset", "", "overrides saved under that name by a search; the command line's win")

_TARGET = re.compile(r"--?config(?:=(.*))?")
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)(?:=.*)?", re.DOTALL)


def run(main: Callable[[], int], *, config_required: bool = True) -> None:
    """Parses the command line, exits with what `main` returns, and reports foreseen errors in a line.

    Where the launcher has a flag `--point`, it stands for the overrides of that point of the experiment's sweep.
    """
    if config_required:
        flags.mark_flag_as_required("config")

    def guarded(argv: Sequence[str]) -> None:
        del argv
        logging.set_verbosity(logging.FATAL)  # orbax tells at length what it also raises
        warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
        ignore_absent_tpu()
        try:
            check_precision()
            sys.exit(main())
        except Exception as error:
            _report(error)

    app.run(guarded, flags_parser=_parse)


def given() -> bool:
    """Whether there is a `--config`."""
    return flags.FLAGS["config"].present > 0 or _CONFIG.value is not None


def target() -> str:
    """The experiment and its argument, as given: `experiments/x.py:arg`."""
    return config_flags.get_config_filename(flags.FLAGS["config"])


def config() -> ml_collections.ConfigDict:
    """The experiment's config with the preset's and the command line's overrides."""
    chosen = _CONFIG.value
    if _PRESET.value:
        fields.override(chosen, overrides())
    return chosen


def overrides() -> fields.Overrides:
    """The preset's and the command line's overrides by dotted name."""
    given = config_flags.get_override_values(flags.FLAGS["config"])
    return (_preset(_CONFIG.value.run.root, _PRESET.value) if _PRESET.value else {}) | given


def save_preset(root: str, name: str, settings: fields.Overrides) -> pathlib.Path:
    """Saves overrides for `--preset=NAME`, and returns the file."""
    path = _preset_path(root, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, settings)
    return path


def _preset(root: str, name: str) -> fields.Overrides:
    path = _preset_path(root, name)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.json"))) or "none"
        raise ConfigError(f"--preset={name}: no {path}; there are {known}")
    settings = files.read_json(path)
    return {name: tuple(setting) if isinstance(setting, list) else setting for name, setting in settings.items()}


def _preset_path(root: str, name: str) -> pathlib.Path:
    return pathlib.Path(root) / "presets" / f"{name}.json"


def expand(arguments: Sequence[str]) -> list[str]:
    """Replaces `--point=LABEL` by the overrides that it stands for.

    Raises:
      ConfigError: there is no such point, or an argument or the preset has another value of a field of the sweep's.
    """
    label, rest = _take("point", arguments)
    chosen, _ = _take("config", rest)
    if not (label and chosen):
        return rest
    check(rest)
    preset, _ = _take("preset", rest)
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=["", *rest])
    try:
        values(["", *rest], known_only=True)
    except flags.Error:
        return rest  # the launcher's own parser meets it, too, and shows the usage
    given = config_flags.get_override_values(values["config"])
    common = (_preset(holder.value.run.root, preset) if preset else {}) | given
    return [*rest, *experiment.as_flags(experiment.point(chosen, label, common))]


def check(arguments: Sequence[str]) -> None:
    """Checks the experiment, its argument and the names of overrides, which config_flags would meet with a traceback.

    Raises:
      ConfigError: one of them does not exist, or an override would replace a whole group of fields.
    """
    chosen = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if match := _TARGET.fullmatch(argument):
            module, arg = experiment.load(match[1] or following)
            chosen = module.get_config(arg)
        elif (match := _OVERRIDE.fullmatch(argument)) and chosen is not None:
            fields.check_name(chosen, match[1])


def _take(name: str, arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of the flag, None where it is not given, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", f"-{name}")
    known, rest = parser.parse_known_args(arguments)
    return getattr(known, name), rest


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        if "point" in flags.FLAGS:
            sys.argv = argv = [argv[0], *expand(argv[1:])]  # config_flags looks for overrides in sys.argv
        check(argv[1:])
        rest = app.parse_flags_with_usage(argv)
        if rest[1:]:
            raise ConfigError(f"{' '.join(rest[1:])}: unexpected; overrides are written --config.group.field=value")
    except ConfigError as error:
        _report(error)
    return rest


def _report(error: Exception) -> None:
    """Prints a foreseen error and exits; raises any other."""
    kind = errors.kind(error)
    if kind == errors.OTHER:
        raise error
    print(f"{kind}: {error}", file=sys.stderr)
    codes = dict.fromkeys((errors.INVALID, errors.UNSUPPORTED, errors.IN_USE), exits.INVALID)
    codes[errors.INTERRUPTED] = exits.INTERRUPTED
    sys.exit(codes.get(kind, exits.FAILED))
