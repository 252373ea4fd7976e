"""Schedules: the lists of key blocks that the splash kernel visits, and how it masks them.

A schedule is a function `(layout, config, runtime) -> kernel` for one sequence. `runtime` is the part that is only
known at run time: a mask for `dynamic`, the selected entries for `hybrid`, None for the others, whose schedules are
built once per (layout, config).
"""

import dataclasses
from collections.abc import Callable

from research.attention.attend import Attend
from research.attention.backends.splash.schedules import captured, closed_form, computed, dynamic, hybrid, static
from research.attention.visibility import KINDS, Visibility


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An entry of `TABLE`.

    Attributes:
      kernel: `(layout, config, runtime)`, returns the kernel.
      selects: True if it supports visibilities that select, False if others, None if both.
      bands: whether it only supports visibilities that are bands.
      runtime_mask: whether documents and selected entries are passed as one mask at run time.
      ring_only: whether the kernel can only reduce dq with its ring buffer of three.
      host: `(layout, config)`, computes and caches the part that the host computes before tracing, if there is one.
    """

    kernel: Callable
    selects: bool | None = False
    bands: bool = False
    runtime_mask: bool = False
    ring_only: bool = False
    host: Callable | None = None

    def expresses(self, visibility: type[Visibility]) -> bool:
        """Whether it supports the visibilities of a class."""
        return self.selects in (None, visibility.selects) and (visibility.bands or not self.bands)


TABLE = {
    "captured": Schedule(captured.kernel, ring_only=True),
    "dynamic": Schedule(dynamic.kernel, selects=None, runtime_mask=True, ring_only=True),
    "static": Schedule(static.kernel, host=static.host),
    "closed_form": Schedule(closed_form.kernel, bands=True, host=closed_form.schedules),
    "computed": Schedule(computed.kernel, bands=True, host=closed_form.schedules),
    "hybrid": Schedule(hybrid.kernel, selects=True, bands=True, host=closed_form.schedules),
}
_PREFERRED = ("closed_form", "hybrid", "static", "dynamic")  # 'auto' is the first one that supports a visibility


def expressing(kind: str) -> list[str]:
    """Names of the schedules that support a kind of visibility."""
    return [name for name, schedule in TABLE.items() if schedule.expresses(KINDS[kind])]


def chosen(attend: Attend) -> str:
    """The name of an op's schedule; 'auto' is the default of its visibility.

    Raises:
      SettingError: there is no such schedule, or it does not support the visibility.
    """
    able = expressing(attend.visibility.kind)
    if attend.schedule == "auto":
        return next(name for name in _PREFERRED if name in able)
    if attend.schedule not in TABLE:
        raise attend.error("schedule", f"auto or one of {', '.join(TABLE)}")
    if attend.schedule not in able:
        raise attend.error("schedule", f"auto or one of {', '.join(able)}, which can express {attend.visibility.kind}")
    return attend.schedule
