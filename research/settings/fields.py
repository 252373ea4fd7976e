"""Fields of a config by their dotted names: reading, setting and comparing them."""

import ast
import dataclasses
import difflib
import json
from typing import Any

import ml_collections
from absl import flags

from research.errors import ConfigError, SettingError
from research.settings.config import Settings

Overrides = dict[str, Any]  # values by dotted name: {"attention.block_q": 256}

_NOT_COMPARED = ("run", "wandb", "profile", "distributed")  # where a run is done and recorded


def check_name(config: ml_collections.ConfigDict, name: str) -> None:
    """Raises ConfigError unless `name` is the dotted name of a field; names the nearest ones."""
    fields = field_names(config)
    if name in fields:
        return
    below = [field for field in fields if field.startswith(f"{name}.")]
    if below:
        raise ConfigError(f"config.{name}: is a group and cannot be replaced as a whole; set one of {', '.join(below)}")
    raise ConfigError(f"config.{name}: no such field; the nearest are {', '.join(nearest(name))}")


def nearest(name: str, count: int = 3, cutoff: float = 0.0) -> list[str]:
    """The fields whose dotted names are most like this one, by `difflib`'s measure at least `cutoff`."""
    return difflib.get_close_matches(name, defaults(), count, cutoff)


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


def from_text(config: ml_collections.ConfigDict, name: str, text: str) -> Any:
    """What a command line's `--config.name=text` sets the field of that dotted name to.

    Raises:
      SettingError: the text is none of the field's type.
    """
    parse, words = _TYPES[type(value(config, name))]
    try:
        return parse(text)
    except (ValueError, TypeError, SyntaxError, OverflowError) as error:
        raise SettingError(name, text, words) from error


def _integer(text: str) -> int:
    """Also of 5e0 or 4.0."""
    try:
        return flags.IntegerParser().parse(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _words(text: str) -> tuple[str, ...]:
    """Of `('hca', 'csa')`, `hca,csa` or `hca`."""
    if not set(text) & set("()[]'\""):
        return tuple(text.split(","))
    found = ast.literal_eval(text)
    if not isinstance(found, list | tuple) or not all(isinstance(word, str) for word in found):
        raise ValueError(f"{text}: not words")
    return tuple(found)


_TYPES = {
    bool: (flags.BooleanParser().parse, "true or false"),
    int: (_integer, "an integer"),
    float: (flags.FloatParser().parse, "a number"),
    str: (str, "text"),
    tuple: (_words, "words, as csa,hca or ('csa', 'hca')"),
}


def override(config: ml_collections.ConfigDict, overrides: Overrides) -> None:
    """Sets fields of a config by dotted name, as `--config.name=value` would.

    Raises:
      ConfigError: there is no such field, or the value is of another type.
    """
    for name, setting in overrides.items():
        check_name(config, name)
        expected = type(value(config, name))
        # A float may be written as 1, an integer as 1.0; anything else must be what the command line would have parsed.
        if expected is int and type(setting) is float and setting.is_integer():
            setting = int(setting)
        if type(setting) is not expected and not (expected is float and type(setting) is int):
            raise ConfigError(f"config.{name}={setting!r}: must be of type {expected.__name__}")
        config.update_from_flattened_dict({name: setting})


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """How two configs, as JSON, differ in what they compute; where they run and record it does not count.

    A field that one of them lacks, since it is from another version, has its default there.
    """
    absent = "no such field"
    there, here = (defaults() | flat(config) for config in (there, here))
    return [
        f"{name}: {there.get(name, absent)!r} there, {here.get(name, absent)!r} here"
        for name in sorted(there.keys() | here.keys())
        if compared(name) and there.get(name, absent) != here.get(name, absent)
    ]


def as_json(settings: Settings) -> dict[str, Any]:
    """Settings as `config.json` holds them: tuples are lists."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config, as nested dicts, by dotted name."""
    found = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def defaults() -> dict[str, Any]:
    """The defaults by dotted name, as JSON."""
    return flat(as_json(Settings()))


def compared(name: str) -> bool:
    """Whether the field is one that decides what is computed."""
    return name.partition(".")[0] not in _NOT_COMPARED
