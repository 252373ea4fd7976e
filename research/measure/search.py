"""Looks for blocks and groups of heads, by the roofline first and then by the compiler's verdict."""

import itertools
from typing import Any

from research.attention.spec import Spec
from research.errors import ConfigError, SettingError
from research.hardware import topology_chip
from research.measure import aot, roofline
from research.measure.op import Op
from research.measure.pipeline import Planned
from research.settings.config import Settings
from research.validation import validate

SIZES = (128, 256, 512, 1024, 2048)
_KEPT = 4  # pairs of blocks of each kernel that are compiled, of those with the lowest roofline
_BEATS = ("peak_bytes", "roofline_seconds", "compile_seconds")


def plan(settings: Settings) -> list[Planned]:
    """Settings to be compiled for a config with one kind of layer, as `pipeline.plan` gives them.

    Of all legal pairs of blocks those with the lowest rooflines, forward and backward apart, in every combination, each
    with all heads in a call, an eighth of them, and one.

    Raises:
      SettingError: the config has several kinds of layers, or one that has no blocks to choose.
    """
    if len(settings.model.kinds) > 1:
        raise settings.model.error("layers", "of one kind, for a search")
    platform = topology_chip(settings.aot.topology).platform
    if (name := Spec.make(settings, platform).backend) != "splash":
        raise SettingError("attention.backend", name, "splash, for a search")
    heads = settings.attention.heads
    groups = sorted({0, max(heads // 8, 1), 1} - {heads})
    planned = []
    for blocks in _blocks(settings):
        for group in groups:
            attention = {**blocks, "heads_per_call": group}
            overrides = {f"attention.{field}": value for field, value in attention.items()}
            chosen = settings.replace(attention=attention, aot={"what": ("op",)})
            planned += [Planned(program, overrides, aot.timeout(settings)) for program in aot.programs(chosen)]
    return planned


def front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The compiled rows of forward and backward that no other beats in all respects, the lowest roofline first."""
    compiled = [row for row in rows if row["status"] == "ok" and row["phase"] == "forward_backward"]

    def beats(other: dict, row: dict) -> bool:
        pairs = [(other[name], row[name]) for name in _BEATS]
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    kept = [row for row in compiled if not any(beats(other, row) for other in compiled)]
    return sorted(kept, key=lambda row: (row["roofline_seconds"], row["peak_bytes"]))


def _blocks(settings: Settings) -> list[dict[str, int]]:
    """Block sizes by the names of their settings, from the best pairs of each kernel."""
    chip = topology_chip(settings.aot.topology)
    seconds: dict[str, list[tuple[float, tuple[int, int]]]] = {"forward": [], "backward": []}
    for pair in itertools.product(SIZES, SIZES):
        chosen = settings.replace(attention={"block_q": pair[0], "block_kv": pair[1]})
        try:
            spec = validate(chosen, "tpu")
        except ConfigError:
            continue  # no legal pair for this length, or one whose list of blocks does not fit
        op = Op.make(spec, *spec.kinds)
        for phase, found in seconds.items():
            found.append((roofline.bound(roofline.op_cost(op, phase), chip)["roofline_seconds"], pair))
    best = {phase: [pair for _, pair in sorted(found)[:_KEPT]] for phase, found in seconds.items()}
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv")
    pairs = itertools.product(best["forward"], best["backward"])
    return [dict(zip(names, (*forward, *backward), strict=True)) for forward, backward in pairs]
