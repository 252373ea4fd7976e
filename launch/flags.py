"""The command line of the launchers: `--config=experiments/x.py:arg --config.group.field=value`.

Whatever it says wrong is answered in a line, exit code 2, before JAX is imported, which takes seconds: nothing heavy is
imported here, nor by the launchers before their `main` is called.
"""

import contextlib
import os
import signal
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ml_collections
import rich.console
from absl import app, flags, logging
from ml_collections import config_flags

from launch import line as line_lib
from launch import output, presets, usage
from research import errors, exits
from research.errors import ConfigError
from research.runs import login
from research.settings import fields
from research.settings.config import Settings, is_idle, read
from research.sweeps import experiment

_ARGUMENTS: list[str] = []  # of the command line, as absl's flags are
_HELP = {"-h", "-help", "--help", "-?", "--helpshort", "--helpfull"}


def define_config() -> None:
    """Defines `--config`, and `--preset` beside it, unless another launcher of this process has."""
    if "config" in flags.FLAGS:
        return
    told = "the experiment: experiments/NAME.py or experiments/NAME.py:ARG"
    try:
        config_flags.DEFINE_config_file("config", help_string=told)
    except flags.Error as error:  # it looks into the files of --flagfile
        _report(ConfigError(f"--flagfile: {error}"))
    flags.DEFINE_string("preset", "", "overrides saved under that name by a search; the command line's win")


def run(
    main: Callable[[], int],
    *,
    config_required: bool = True,
    check: Callable[[], object] = lambda: None,
    takes: Sequence[str] = (),
) -> None:
    """Parses the command line, exits with what `main` returns, and reports foreseen errors in a line.

    Without arguments the launcher's own description is the answer, and to `--help` all flags, experiments and fields.
    Where the launcher has a flag `--point`, it stands for the overrides of that point of the experiment's sweep.

    Args:
      main: does the work, and returns the exit code.
      config_required: whether there must be a `--config`, if the launcher has that flag.
      check: raises ConfigError where flags say nothing together; called before JAX is imported.
      takes: what its arguments beside flags are; see `arguments`.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            return _parse(argv, config_required, takes)
        except Exception as error:
            _report(error)

    def guarded(argv: Sequence[str]) -> None:
        del argv
        logging.set_verbosity(logging.FATAL)  # orbax tells at length what it also raises
        _hush_writers()
        warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
        try:
            check()
            if given():
                _check_login()
            _prepare_jax()
            sys.exit(main())
        except Exception as error:
            _report(error)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)
    output.make_patient()
    app.run(guarded, flags_parser=parse)


def given() -> bool:
    """Whether there is a `--config`."""
    return "config" in flags.FLAGS and flags.FLAGS.config is not None


def arguments() -> list[str]:
    """The arguments beside flags, as many as `run` was told."""
    return list(_ARGUMENTS)


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
    chosen, model = experiment.config(target()), config().model
    layers = (*model.prefix, *model.layers)
    fields.override(chosen, {name: value for name, value in overrides().items() if not is_idle(name, layers)})
    return read(chosen)


def overrides() -> fields.Overrides:
    """The preset's and the command line's overrides by dotted name."""
    given = config_flags.get_override_values(flags.FLAGS["config"])
    return presets.load(flags.FLAGS.config.run.root, flags.FLAGS.preset) | given


def _parse(argv: Sequence[str], config_required: bool, takes: Sequence[str]) -> list[str]:
    program, *arguments = argv
    if not arguments:
        usage.show_short(rich.console.Console(stderr=True), takes)
        sys.exit(exits.INVALID)
    try:
        arguments = flags.FLAGS.read_flags_from_files(arguments, force_gnu=False)
    except flags.Error as error:
        raise ConfigError(f"--flagfile: {error}") from error
    takes_config = "config" in flags.FLAGS
    line = line_lib.read(arguments) if takes_config else line_lib.Line(None, None, {}, arguments)
    if _HELP & set(line.rest):
        usage.show_whole(rich.console.Console(), line.config, takes)
        sys.exit(exits.FINISHED)
    sys.argv = [
        program,
        *line_lib.canonical(line, takes_point="point" in flags.FLAGS),
    ]  # where config_flags looks for overrides
    try:
        unparsed = flags.FLAGS(sys.argv)
    except flags.UnrecognizedFlagError as error:
        raise ConfigError(line_lib.unknown_flag(error.flagname, arguments)) from error
    except flags.Error as error:
        raise ConfigError(" ".join(str(error).split())) from error
    positional = ["--"] * ("--" in line.rest) + unparsed[1:]
    if len(positional) < len(takes):
        raise ConfigError(f"{takes[len(positional)]}: is missing; see --help")
    if positional[len(takes) :]:
        told = "overrides are written --config.group.field=value" if takes_config else "see --help"
        raise ConfigError(f"{positional[len(takes)]}: unexpected; {told}")
    _ARGUMENTS[:] = positional
    if config_required and takes_config and line.config is None:
        raise ConfigError("--config: is missing; must be experiments/NAME.py or experiments/NAME.py:ARG, see --help")
    return unparsed


def _hush_writers() -> None:
    """Keeps quiet the threads that still write a checkpoint of which another part has failed, as on a full disk.

    Each would print that the event loop of its writer is gone; that writer raises what is wrong.
    """
    told = sys.unraisablehook

    def hook(unraisable: Any) -> None:  # its type has no name at run time
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            told(unraisable)

    sys.unraisablehook = hook


def _end_at_once(number: int, frame: types.FrameType | None) -> None:
    """What Ctrl-C does before there is something to save, or the second time, which does not wait for that.

    No exception: raised while an extension module is imported it crashes the process, and in callbacks it is lost.
    """
    del frame
    with contextlib.suppress(OSError):
        os.write(2, f"{errors.INTERRUPTED}: {signal.Signals(number).name}, at once\n".encode())  # streams may be in use
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)  # so that whoever started it learns what ended it


def _check_login() -> None:
    """Raises ConfigError where wandb cannot record as asked; a process of several may leave that to the first."""
    if not config().distributed.coordinator:
        login.check(config().wandb.mode)


def _prepare_jax() -> None:
    from research.devices import ignore_absent_devices
    from research.validation import check_precision

    ignore_absent_devices()
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
