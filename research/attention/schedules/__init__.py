"""Schedules: the list of key blocks that the splash kernel visits, and how it masks them.

A schedule is a function `(layout, splash_config, mask) -> kernel`. Those that are fixed before the program runs take
no mask and are built once per (layout, config); those that follow a runtime mask take a bool [q_len, kv_len].
"""

import dataclasses
from collections.abc import Callable

from research.attention.schedules import captured, closed_form, computed, dynamic, static

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
}
_DEFAULT = {"sliding": "closed_form", "hca": "closed_form", "csa": "dynamic"}


def resolve_name(name: str, kind: str) -> str:
    """The schedule of that name for a visibility's kind; 'auto' is the kind's default.

    Raises:
      ValueError: the name is unknown, or the schedule cannot express the kind.
    """
    allowed = [known for known, schedule in TABLE.items() if kind in schedule.kinds]
    if name == "auto":
        return _DEFAULT[kind]
    if name not in TABLE:
        raise ValueError(f"schedule={name!r}: must be auto or one of {', '.join(TABLE)}")
    if name not in allowed:
        raise ValueError(f"schedule={name!r}: cannot express {kind} attention; use {', '.join(allowed)}")
    return name
