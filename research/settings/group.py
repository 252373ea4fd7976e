"""How settings are declared: a frozen dataclass a group, each field with a default, a meaning, and what is allowed."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

from research.errors import SettingError


class Allowed(NamedTuple):
    """Whether a value is allowed, and in words what is: they follow "must be"."""

    holds: Callable[[Any], bool]
    words: str


POSITIVE = Allowed(lambda value: value > 0, "positive")
NOT_NEGATIVE = Allowed(lambda value: value >= 0, "0 or more")
UNSET_OR_MORE = Allowed(lambda value: value >= 0, "0 (chosen for you) or more")


def one_of(*names: str) -> Allowed:
    """One of these words."""
    return Allowed(lambda value: value in names, f"one of {', '.join(names)}")


def some_of(*names: str) -> Allowed:
    """A tuple of some of these words."""
    return Allowed(
        lambda value: bool(value) and set(value) <= set(names), f"a non-empty tuple of members among {', '.join(names)}"
    )


def divisors(count: int) -> str:
    """All divisors, for a message that says what is allowed."""
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)


def setting(
    default: Any, meaning: str, allowed: Allowed | None = None, only: str = "", kinds: tuple[str, ...] = ()
) -> Any:
    """A field of a group.

    Args:
      default: its value unless it is set; never None, which a command line could not override.
      meaning: a line.
      allowed: which values are; None: all of the default's type. Floats must be finite in any case.
      only: the kind of attention layer without which only the default is allowed, empty for any.
      kinds: the kinds of attention layers that read the setting, empty for all. Without one a config may set it, for
        sweeps vary the kinds beside it, but not an override: see `Settings.is_idle`.
    """
    metadata = {"meaning": meaning, "allowed": allowed, "only": only, "kinds": (only,) if only else kinds}
    return dataclasses.field(default=default, metadata=metadata)


class Group:
    """Base of all groups of settings. One that exists is valid: it is checked when it is made.

    Attributes:
      group: its name in a config, `config.<group>.<field>`; empty for the config itself.
    """

    group: ClassVar[str]

    def __init_subclass__(cls, group: str = "") -> None:
        cls.group = group

    def __post_init__(self) -> None:
        """Raises SettingError where a field's value is not allowed, alone or beside the others."""
        for field in dataclasses.fields(self):
            allowed, value = field.metadata.get("allowed"), getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise self.error(field.name, f"finite and {allowed.words}" if allowed else "finite")
            if allowed and not allowed.holds(value):
                raise self.error(field.name, allowed.words)
        for name, words in self.conflicts():
            raise self.error(name, words)

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Fields whose values are not allowed beside those of the others, and what is."""
        yield from ()

    def error(self, name: str, allowed: str) -> SettingError:
        """That a field's value is not allowed; `allowed` as in `SettingError`."""
        return SettingError(f"{self.group}.{name}".lstrip("."), getattr(self, name), allowed)

    def is_default(self, name: str) -> bool:
        """Whether a field has its default."""
        return getattr(self, name) == type(self).default(name)

    @classmethod
    def default(cls, name: str) -> Any:
        """The default of a field."""
        return cls.__dataclass_fields__[name].default
