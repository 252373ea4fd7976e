"""Experiment files, overrides and sweeps: the grammar shared by the launchers, the tests and notebooks.

An experiment is a Python file that asks one question. It defines

    ARGS               what may follow the colon in `--config=experiments/x.py:arg`
    get_config(arg)    the config
    sweep(arg)         the points, what the question varies and then `cross.points`, each a dict of overrides by
                       dotted name: {"attention.block_q": 256}, or a `Point` of such a dict and of the labels of the
                       points that must have finished before it
    HEADLINE           the numbers of `summary.json` that answer the question
    check(rows)        optional: reports on a finished sweep, and raises CheckError if it must not be trusted
    REPORTS            optional: by measure (`bench`, `masks`, `aot`: the launchers' names) a function from its rows to
                       lines that answer the question

One rule for overrides, in every launcher and for presets alike. A field that no point sets takes the override in all
points. A field that some point sets is the sweep's: each point has a value of it, its own or else the config's, and the
override narrows the sweep to the points that have the given one; a value that none of them has is refused. So a
narrowed sweep is a part of the sweep, point by point the same, and its results lie in the same folder. An override that
no layer of a point reads is left out there; one that no point's layers read is refused.

One file, longer than others: it is the grammar.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import importlib.util
import json
import pathlib
import traceback
import types
from collections.abc import Iterator
from typing import Any

import ml_collections

from research.errors import ConfigError
from research.settings.fields import Overrides, override, value

Row = dict[str, Any]  # a point of a sweep with its summary; see `research.sweeps.sweep.run_point`

_LONGEST_LABEL = 120  # a folder's name may have 255 bytes


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of an experiment's sweep.

    Attributes:
      overrides: what it sets.
      after: the label, or labels, of points of the same sweep that it needs: it starts when they have finished well.
    """

    overrides: Overrides
    after: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.after, str):
            object.__setattr__(self, "after", (self.after,))

    @property
    def label(self) -> str:
        """Its name within the sweep, and that of its folder."""
        return label(self.overrides)


class CheckError(Exception):
    """A sweep's results contradict what its experiment takes for granted."""


def load(target: str) -> tuple[types.ModuleType, str]:
    """Imports the file of `path.py:arg`, and returns its module and the arg, empty where there is none.

    Raises:
      ConfigError: there is no such file, or it is no experiment.
    """
    path, _, arg = located(target).partition(":")
    if not pathlib.Path(path).is_file():
        raise ConfigError(
            f"--config={target}: no file {path!r}; must be experiments/NAME.py or experiments/NAME.py:ARG"
        )
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    if spec is None:
        raise ConfigError(f"--config={target}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    with _in_a_line(target, path):
        spec.loader.exec_module(module)
    missing = [name for name in ("ARGS", "get_config", "sweep", "HEADLINE") if not hasattr(module, name)]
    if missing:
        raise ConfigError(f"--config={target}: {path} is no experiment, it lacks {', '.join(missing)}")
    return module, arg


def located(target: str) -> str:
    """The target with the path of its file: from the working folder or, if it is not there, from where this code is."""
    path, colon, arg = target.partition(":")
    here = pathlib.Path(__file__).parents[2] / path
    return f"{here}{colon}{arg}" if not pathlib.Path(path).exists() and here.is_file() else target


def config(target: str) -> ml_collections.ConfigDict:
    """The config of an experiment, with its argument.

    Raises:
      ConfigError: as `load`; or the experiment does not know the argument, or makes no config.
    """
    module, arg = load(target)
    with _in_a_line(target, located(target).partition(":")[0]):
        made = module.get_config(arg) if ":" in target else module.get_config()  # as config_flags does
    if not isinstance(made, ml_collections.ConfigDict):
        raise ConfigError(f"--config={target}: get_config makes a {type(made).__name__}; must be a ConfigDict")
    return made


@contextlib.contextmanager
def _in_a_line(target: str, path: str) -> Iterator[None]:
    """Within it, what an experiment's file raises is a ConfigError that tells where."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        place = f"line {error.lineno}" if isinstance(error, SyntaxError) else _line(error, path)
        said = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        raise ConfigError(f"--config={target}: {path}, {place}: {type(error).__name__}: {said}") from error


def _line(error: Exception, path: str) -> str:
    """Where in a file an error was raised, or what raised it was called."""
    file = pathlib.Path(path).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if pathlib.Path(frame.filename).resolve() == file]
    return f"line {lines[-1]}" if lines else "when imported"


def check_arg(arg: str, known: tuple[str, ...]) -> None:
    """Raises ConfigError where an experiment does not know the word after the colon."""
    if arg not in known:
        raise ConfigError(f"argument {arg!r} after the colon: must be one of {', '.join(map(repr, known))}")


def points(target: str, common: Overrides | None = None) -> list[Point]:
    """The points of an experiment's sweep, narrowed to those that agree with overrides; the module tells the rule.

    Args:
      target: the experiment and its argument, `experiments/x.py:arg`.
      common: overrides for all points.

    Raises:
      ConfigError: no point has a value, or a value is of another type; two points have one label; or a point is after
        one that does not exist, after itself, or starts from one that it is not after.
    """
    made, common = config(target), common or {}
    if "run.id" in common:
        raise ConfigError("config.run.id: is set by the sweep itself, for each of its points")
    whole = kept = _points(target)
    for name, setting in swept(target, common).items():
        override(config(target), {name: setting})  # its type
        found = [_value(made, point, name) for point in whole]
        if setting not in found:
            values = f"{_alternatives(found)}, one of the values among the points of {target}"
            raise ConfigError(f"config.{name}={setting}: must be {values}")
        kept = [point for point in kept if _value(made, point, name) == setting]
    if not kept:
        given = " and ".join(f"config.{name}={setting}" for name, setting in swept(target, common).items())
        raise ConfigError(f"{given}: no point of {target} has them together")
    _check_starts(made, common, whole, kept)
    return kept


def point(target: str, name: str, common: Overrides | None = None) -> Overrides:
    """The overrides of the point of an experiment's sweep that has this label.

    Raises:
      ConfigError: there is none, naming the nearest ones; or `common` has another value of a field of the sweep's.
    """
    labelled = {point.label: point for point in _points(target)}
    if name not in labelled:
        nearest = difflib.get_close_matches(name, labelled, n=3, cutoff=0.0)
        raise ConfigError(f"--point={name}: {target} has no such point; the nearest are {', '.join(nearest)}")
    for field, setting in swept(target, common or {}).items():
        there = _value(config(target), labelled[name], field)
        if setting != there:
            raise ConfigError(f"config.{field}={setting}: must be {there}, as the point {name} of {target} has it")
    return labelled[name].overrides


def swept(target: str, common: Overrides) -> Overrides:
    """Those of the overrides that narrow the sweep, for some point of it sets their field."""
    fields = {field for point in _points(target) for field in point.overrides}
    return {name: setting for name, setting in common.items() if name in fields}


def _points(target: str) -> list[Point]:
    """All points of a sweep, their labels and their order checked."""
    module, arg = load(target)
    with _in_a_line(target, located(target).partition(":")[0]):
        found = [made if isinstance(made, Point) else Point(made) for made in module.sweep(arg)]
    if not found:
        raise ConfigError(f"--config={target}: its sweep has no points")
    labelled = {point.label: point for point in found}
    if len(labelled) < len(found):
        names = [point.label for point in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{target}: {names.count(twice)} points of the sweep are {twice!r}; must differ in a setting")
    for name, point in labelled.items():
        if unknown := [before for before in point.after if before not in labelled]:
            nearest = difflib.get_close_matches(unknown[0], labelled.keys() - {name}, n=3, cutoff=0.0)
            raise ConfigError(f"{target}: {name} is after={unknown[0]!r}; must be a point, as {', '.join(nearest)}")
        if name in _before(labelled, name):
            raise ConfigError(f"{target}: {name} is after itself, by after={', '.join(point.after)}")
    return found


def _before(labelled: dict[str, Point], name: str) -> set[str]:
    """The labels of all points that this one is after, directly or by way of others."""
    found, open_ = set(), [*labelled[name].after]
    while open_:
        before = open_.pop()
        if before not in found:
            found.add(before)
            open_ += labelled[before].after if before in labelled else ()
    return found


def _check_starts(config: ml_collections.ConfigDict, common: Overrides, whole: list[Point], kept: list[Point]) -> None:
    """Raises ConfigError where a point starts from another whose end it does not wait for."""
    labelled = {point.label: point for point in whole}
    for point in kept:
        start = (common | point.overrides).get("train.start_from", config.train.start_from)
        source = start if start in labelled else start.rpartition("@")[0]  # ID or ID@STEP
        if source in labelled and source not in _before(labelled, point.label):
            raise ConfigError(
                f"{point.label}: config.train.start_from={start}: is a point of the sweep, so must be after it"
            )


def _value(config: ml_collections.ConfigDict, point: Point, name: str) -> Any:
    """What a point has for the field: its own, or else the config's."""
    return point.overrides[name] if name in point.overrides else value(config, name)


def _alternatives(values: list[Any]) -> str:
    """Each value once: `64, 128 or 256`."""
    *others, last = dict.fromkeys(map(str, values))
    return f"{', '.join(others)} or {last}" if others else last


def as_flags(overrides: Overrides) -> list[str]:
    """Overrides as command-line arguments."""

    def text(setting: Any) -> str:
        # Double quotes inside a tuple: shlex then needs none of its own tricks to quote the whole.
        return f"({''.join(f'{json.dumps(member)},' for member in setting)})" if isinstance(setting, tuple) else setting

    return [f"--config.{name}={text(setting)}" for name, setting in overrides.items()]


def label(overrides: Overrides) -> str:
    """A short name for overrides, fit for a folder: `layers=hca,backend=splash,block_q=128`.

    Those that only say where a run is recorded are left out.
    """
    overrides = {name: setting for name, setting in overrides.items() if not name.startswith(("run.", "wandb."))}
    last = [name.rpartition(".")[2] for name in overrides]
    parts = []
    for (name, setting), short in zip(overrides.items(), last, strict=True):
        text = "+".join(map(str, setting)) if isinstance(setting, tuple) else str(setting)
        parts.append(f"{short if last.count(short) == 1 else name}={text}")
    whole = ",".join(parts).replace("/", "_")
    if len(whole) <= _LONGEST_LABEL:
        return whole
    return f"{whole[:_LONGEST_LABEL]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
