"""Schedules: the list of key blocks that the splash kernel visits, and how it masks them.

A schedule is a function `(layout, splash_config, given) -> kernel` of one sequence. Those that are fixed before the
program runs are given nothing and built once per (layout, config), `dynamic` is given a mask that exists at run time,
bool [q_len, kv_len], and `hybrid` the indexer's choice, bool [S, C].
"""

import dataclasses
from collections.abc import Callable

from research.attention.attend import Attend
from research.attention.backends.splash.schedules import captured, closed_form, computed, dynamic, hybrid, static
from research.attention.visibility import KINDS, Visibility


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An entry of the table.

    Attributes:
      kernel: makes the kernel.
      selects: whether it can express visibilities that select, those that do not, or (None) both.
      bands: whether it can express none but visibilities that are bands.
      runtime_mask: whether documents and selection arrive as one mask at run time.
      ring_only: whether the kernel leaves no other way to reduce dq than its ring buffer of three.
      host: `(layout, config)`, makes and caches what the host computes before the program is traced, if anything.
    """

    kernel: Callable
    selects: bool | None = False
    bands: bool = False
    runtime_mask: bool = False
    ring_only: bool = False
    host: Callable | None = None

    def expresses(self, visibility: type[Visibility]) -> bool:
        """Whether it can express the visibilities of a class."""
        return self.selects in (None, visibility.selects) and (visibility.bands or not self.bands)


TABLE = {
    "captured": Schedule(captured.kernel, ring_only=True),
    "dynamic": Schedule(dynamic.kernel, selects=None, runtime_mask=True, ring_only=True),
    "static": Schedule(static.kernel, host=static.kernel),
    "closed_form": Schedule(closed_form.kernel, bands=True, host=closed_form.schedules),
    "computed": Schedule(computed.kernel, bands=True, host=closed_form.schedules),
    "hybrid": Schedule(hybrid.kernel, selects=True, bands=True, host=closed_form.schedules),
}
_PREFERRED = ("closed_form", "hybrid", "static", "dynamic")  # 'auto' is the first one that can express a visibility


def expressing(kind: str) -> list[str]:
    """Names of the schedules that can express a kind of visibility."""
    return [name for name, schedule in TABLE.items() if schedule.expresses(KINDS[kind])]


def chosen(attend: Attend) -> str:
    """The schedule that an op asks for; 'auto' is its visibility's default.

    Raises:
      SettingError: there is no such schedule, or it cannot express the visibility.
    """
    able = expressing(attend.visibility.kind)
    if attend.schedule == "auto":
        return next(name for name in _PREFERRED if name in able)
    if attend.schedule not in TABLE:
        raise attend.error("schedule", f"auto or one of {', '.join(TABLE)}")
    if attend.schedule not in able:
        raise attend.error("schedule", f"auto or one of {', '.join(able)}, which can express {attend.visibility.kind}")
    return attend.schedule
