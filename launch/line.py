"""A command line before absl parses it: the experiment, overrides checked and in one form, and the other arguments."""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

import ml_collections
from absl import flags

from launch import presets
from research.errors import ConfigError
from research.settings import fields
from research.sweeps import experiment

_TARGET = re.compile(r"--?config(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"--?(no)?config\.([^=]*)(?:=(.*))?", re.DOTALL)


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


def read(arguments: Sequence[str]) -> Line:
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
    common = presets.load(line.overrides.get("run.root", line.config.run.root), preset or "") | line.overrides
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


def unknown_flag(name: str, arguments: Sequence[str]) -> str:
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
