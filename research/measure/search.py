"""Looks for blocks and groups of heads, by the roofline first and then by the compiler's verdict."""

import itertools
from typing import Any

import ml_collections

from research import config as config_lib
from research.errors import ConfigError
from research.measure import aot, roofline
from research.model import spec as model_spec
from research.settings import fields

SIZES = (128, 256, 512, 1024, 2048)
_KEPT = 4  # pairs of blocks of each kernel that are compiled, of those with the lowest roofline
_BEATS = ("peak_bytes", "roofline_seconds", "compile_seconds")


def plan(config: ml_collections.ConfigDict) -> list[tuple[fields.Overrides, aot.Point, float]]:
    """Settings to be compiled for a config with one kind of layer, as `aot.plan` gives them.

    Of all legal pairs of blocks those with the lowest rooflines, forward and backward apart, in every combination, each
    with all heads in a call, an eighth of them, and one.

    Raises:
      ConfigError: the config has several kinds of layers, or one that has no blocks to choose.
    """
    kinds = set(config.model.layers)
    if len(kinds) > 1:
        raise ConfigError(f"config.model.layers={config.model.layers}: must be of one kind, for a search")
    if (name := model_spec.from_config(config, "tpu").attention.backend) != "splash":
        raise ConfigError(f"config.attention.backend={name}: must be splash, for a search")
    heads = config.attention.heads
    groups = sorted({0, max(heads // 8, 1), 1} - {heads})
    planned = []
    for q, kv, q_dkv, kv_dkv in _blocks(config):
        for group in groups:
            overrides = {
                "attention.block_q": q,
                "attention.block_kv": kv,
                "attention.block_q_dkv": q_dkv,
                "attention.block_kv_dkv": kv_dkv,
                "attention.heads_per_call": group,
            }
            chosen = config.copy_and_resolve_references()
            fields.override(chosen, overrides)
            chosen.aot.what = ("op",)
            planned += [(overrides, point, config.aot.timeout_minutes * 60) for point in aot.of_config(chosen)]
    return planned


def front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The compiled rows of forward and backward that no other beats in all respects, the lowest roofline first."""
    compiled = [row for row in rows if row["status"] == "ok" and row["phase"] == "forward_backward"]

    def beats(other: dict, row: dict) -> bool:
        pairs = [(other[name], row[name]) for name in _BEATS]
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    kept = [row for row in compiled if not any(beats(other, row) for other in compiled)]
    return sorted(kept, key=lambda row: (row["roofline_seconds"], row["peak_bytes"]))


def _blocks(config: ml_collections.ConfigDict) -> list[tuple[int, int, int, int]]:
    """block_q, block_kv, block_q_dkv and block_kv_dkv, from the best pairs of each kernel."""
    chip = aot.chip_of(config.aot.topology)
    seconds: dict[str, list[tuple[float, tuple[int, int]]]] = {"forward": [], "backward": []}
    for pair in itertools.product(SIZES, SIZES):
        chosen = config.copy_and_resolve_references()
        chosen.attention.block_q, chosen.attention.block_kv = pair
        try:
            config_lib.validate(chosen, "tpu")
        except ConfigError:
            continue  # no legal pair for this length, or one whose list of blocks does not fit
        spec = model_spec.from_config(chosen, "tpu")
        single = aot.op_point(chosen.data.batch_size, chosen.data.seq_len, spec, spec.layers[0])
        effective = config_lib.effective(chosen, "tpu")[spec.layers[0]]
        for phase, found in seconds.items():
            cost = roofline.of_op(single, effective, phase)
            found.append((roofline.bound(cost, chip)["roofline_seconds"], pair))
    best = {phase: [pair for _, pair in sorted(found)[:_KEPT]] for phase, found in seconds.items()}
    return [(*a, *b) for a, b in itertools.product(best["forward"], best["backward"])]
