"""Schedules: the list of key blocks that the splash kernel visits, and how it masks them.

A schedule is a function `(layout, splash_config, given) -> kernel` of one sequence. Those that are fixed before the
program runs are given nothing and built once per (layout, config), `dynamic` is given a mask that exists at run time,
bool [q_len, kv_len], and `hybrid` the indexer's choice, bool [S, C].
"""

import dataclasses
from collections.abc import Callable

from research.attention.backends.splash.schedules import captured, closed_form, computed, dynamic, hybrid, static

_FIXED = ("sliding", "hca")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An entry of the table.

    Attributes:
      kernel: makes the kernel.
      kinds: visibilities it can express, by `visibility.kind`.
      runtime_mask: whether documents and selection arrive as one mask at run time.
      ring_only: whether the kernel leaves no other way to reduce dq than its ring buffer of three.
      host: `(layout, config)`, makes and caches what the host computes before the program is traced, if anything.
    """

    kernel: Callable
    kinds: tuple[str, ...] = _FIXED
    runtime_mask: bool = False
    ring_only: bool = False
    host: Callable | None = None


TABLE = {
    "captured": Schedule(captured.kernel, ring_only=True),
    "dynamic": Schedule(dynamic.kernel, kinds=(*_FIXED, "csa"), runtime_mask=True, ring_only=True),
    "static": Schedule(static.kernel, host=static.kernel),
    "closed_form": Schedule(closed_form.kernel, host=closed_form.schedules),
    "computed": Schedule(computed.kernel, host=closed_form.schedules),
    "hybrid": Schedule(hybrid.kernel, kinds=("csa",), host=closed_form.schedules),
}
_DEFAULT = {"sliding": "closed_form", "hca": "closed_form", "csa": "hybrid"}


def expressing(kind: str) -> list[str]:
    """Names of the schedules that can express a visibility's kind."""
    return [name for name, schedule in TABLE.items() if kind in schedule.kinds]


def resolve_name(name: str, kind: str) -> str:
    """The schedule of that name for a visibility's kind; 'auto' is the kind's default.

    Raises:
      ValueError: the name is unknown, or the schedule cannot express the kind.
    """
    if name == "auto":
        return _DEFAULT[kind]
    if name not in TABLE:
        raise ValueError(f"schedule={name!r}: must be auto or one of {', '.join(TABLE)}")
    allowed = expressing(kind)
    if name not in allowed:
        raise ValueError(f"schedule={name!r}: cannot express {kind} attention; use {', '.join(allowed)}")
    return name
