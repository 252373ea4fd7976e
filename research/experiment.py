"""Experiment files, overrides and sweeps: the grammar shared by the launchers, the tests and notebooks.

An experiment is a Python file that asks one question. It defines

    ARGS               what may follow the colon in `--config=experiments/x.py:arg`
    get_config(arg)    the config
    sweep(arg)         the points, each a dict of overrides by dotted name: {"attention.block_q": 256}
    HEADLINE           the numbers of `summary.json` that answer the question
    check(rows)        optional: reports on a finished sweep, and raises CheckError if it must not be trusted
    report(rows)       optional: lines that answer the question from the rows of `launch/bench.py`
    report_masks(rows) optional: the same from those of `launch/masks.py`
    report_aot(rows)   optional: the same from those of `launch/aot.py`
"""

import difflib
import hashlib
import importlib.util
import json
import pathlib
import types
from typing import Any

import ml_collections

from research.config import ConfigError

Overrides = dict[str, Any]
Row = dict[str, Any]  # a point of a sweep with its summary; see `research.sweep.run_point`

_LONGEST_LABEL = 120  # a folder's name may have 255 bytes


class CheckError(Exception):
    """A sweep's results contradict what its experiment takes for granted."""


def load(target: str) -> tuple[types.ModuleType, str]:
    """Imports the file of `path.py:arg`, and returns its module and the arg, empty where there is none.

    Raises:
      ConfigError: there is no such file, or it is no experiment.
    """
    path, _, arg = target.partition(":")
    if not pathlib.Path(path).is_file():
        raise ConfigError(
            f"--config={target}: no file {path!r}; must be experiments/NAME.py or experiments/NAME.py:ARG"
        )
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = [name for name in ("ARGS", "get_config", "sweep", "HEADLINE") if not hasattr(module, name)]
    if missing:
        raise ConfigError(f"--config={target}: {path} is no experiment, it lacks {', '.join(missing)}")
    return module, arg


def check_arg(arg: str, known: tuple[str, ...]) -> None:
    """Raises ConfigError where an experiment does not know the word after the colon."""
    if arg not in known:
        raise ConfigError(f"argument {arg!r} after the colon: must be one of {', '.join(map(repr, known))}")


def point(target: str, name: str) -> Overrides:
    """The point of an experiment's sweep that has this label.

    Raises:
      ConfigError: there is none; names the nearest ones.
    """
    module, arg = load(target)
    points = {label(overrides): overrides for overrides in module.sweep(arg)}
    if name not in points:
        nearest = difflib.get_close_matches(name, points, n=3, cutoff=0.0)
        raise ConfigError(f"--point={name}: {target} has no such point; the nearest are {', '.join(nearest)}")
    return points[name]


def check_name(config: ml_collections.ConfigDict, name: str) -> None:
    """Raises ConfigError unless `name` is the dotted name of a field; names the nearest ones."""
    fields = field_names(config)
    if name in fields:
        return
    below = [field for field in fields if field.startswith(f"{name}.")]
    if below:
        raise ConfigError(f"config.{name}: is a group and cannot be replaced as a whole; set one of {', '.join(below)}")
    nearest = difflib.get_close_matches(name, fields, n=3, cutoff=0.0)
    raise ConfigError(f"config.{name}: no such field; the nearest are {', '.join(nearest)}")


def field_names(config: ml_collections.ConfigDict) -> list[str]:
    """Dotted names of all fields."""
    names = []
    for name, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            names += [f"{name}.{below}" for below in field_names(value)]
        else:
            names.append(name)
    return names


def value(config: ml_collections.ConfigDict, name: str) -> Any:
    """The field of that dotted name."""
    for part in name.split("."):
        config = config[part]
    return config


def override(config: ml_collections.ConfigDict, overrides: Overrides) -> None:
    """Sets fields of a config by dotted name, as `--config.name=value` would.

    Raises:
      ConfigError: there is no such field, or the value is of another type.
    """
    for name, setting in overrides.items():
        check_name(config, name)
        expected = type(value(config, name))
        # A float may be written as 1; anything else must be what the command line would have parsed.
        if type(setting) is not expected and not (expected is float and type(setting) is int):
            raise ConfigError(f"config.{name}={setting!r}: must be of type {expected.__name__}")
        config.update_from_flattened_dict({name: setting})


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
