"""The cross that every experiment owes beside its question: mask strategies x block sizes x dq_reduction_steps."""

import itertools
from collections.abc import Iterable
from typing import Any

import ml_collections

from research.attention.backends.splash import schedules
from research.settings.fields import Overrides, value

_UNSCHEDULED = ("dot_product", "blockwise")


def points(
    config: ml_collections.ConfigDict,
    cases: Iterable[Overrides],
    blocks: Iterable[int | tuple[int, int]],
    names: Iterable[str] | None = None,
    steps: tuple[int, ...] = (0, 3),
    fewest_blocks: int = 4,
    unscheduled: bool = False,
) -> list[Overrides]:
    """Splash's schedules x block sizes x dq_reduction_steps, as far as they can differ, for each of some cases.

    Args:
      config: the experiment's.
      cases: what points set beside; with the config it says which layers there are, in which stage, how many tokens.
      blocks: sizes in tokens, of queries and keys alike or as (queries, keys); 0 leaves them to the backend.
      names: schedules to try, in this order, but for those that cannot express the layers; None for all that can.
      steps: values of dq_reduction_steps; the first alone where they are no choice, because the schedule has nothing
        but the ring buffer, or because there are so few key blocks that it would hold nearly all of them.
      fewest_blocks: blocks of local keys from which on `steps` are a choice; 1 to try them everywhere.
      unscheduled: whether a case begins with a point under each of the backends that have nothing of this to choose.
    """
    names = tuple(schedules.TABLE if names is None else names)
    sizes = [size if isinstance(size, tuple) else (size, size) for size in blocks]
    found = []
    for case in cases:
        if unscheduled:
            found += [case | {"attention.backend": name} for name in _UNSCHEDULED]
        kinds, fields = _scheduled(config, case)
        fitting = [name for name in names if all(name in schedules.expressing(kind) for kind in kinds)]
        seq_len = _value(config, case, "data.seq_len")
        splash = {} if _value(config, case, "attention.backend") == "splash" else {"attention.backend": "splash"}
        for name, (block_q, block_kv) in itertools.product(fitting, sizes):
            point = case | splash | dict.fromkeys(fields, name)
            point |= {"attention.block_q": block_q, "attention.block_kv": block_kv} if block_kv else {}
            few = block_kv and seq_len // block_kv < fewest_blocks
            choice = steps[:1] if few or schedules.TABLE[name].ring_only else steps
            found += [point | {"attention.dq_reduction_steps": number} for number in choice]
    return found


def _scheduled(config: ml_collections.ConfigDict, case: Overrides) -> tuple[set[str], list[str]]:
    """The kinds of visibility that a schedule has to express, and the fields that name it.

    CSA layers that select keep theirs beside others, for only runtime masks serve both. Those that do not yet select
    see all entries, as HCA does.
    """
    layers = {*_value(config, case, "model.prefix"), *_value(config, case, "model.layers")}
    selects = _value(config, case, "attention.csa_stage") == "sparse"
    scheduled = layers - {"csa"} if selects and layers != {"csa"} else layers
    kinds = {"hca" if kind == "csa" and not selects else kind for kind in scheduled}
    fields = {"attention.csa_schedule" if kind == "csa" else "attention.schedule" for kind in scheduled}
    return kinds, sorted(fields, reverse=True)


def _value(config: ml_collections.ConfigDict, case: Overrides, name: str) -> Any:
    return case[name] if name in case else value(config, name)
