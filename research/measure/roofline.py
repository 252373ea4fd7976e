"""A model, not a measurement: how long a chip needs at best, by its peak FLOP/s and by its memory's bandwidth.

Counted of an attention: the products over all scheduled blocks, visible or not, and the blocks that the kernel moves
between HBM and the core, from its index maps. Around it, every matrix times every token, and what enters and leaves the
program once. Softmax, norms and the latency of a kernel's steps are not counted. CSA's blocks depend on the indexer;
counted are all that it could reach.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from research.attention import backends
from research.attention.backends.splash import attend
from research.attention.backends.splash.schedules import closed_form
from research.hardware import Chip
from research.measure.op import PRODUCTS, Point, useful_flops

_FLOAT32 = 4
_SUBLANES = 8  # over which the kernel repeats its float32 of a row


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOPs of the scheduled and of the visible pairs, and bytes moved."""

    scheduled_flops: float
    useful_flops: float
    moved_bytes: float

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def bound(cost: Cost, chip: Chip) -> dict[str, Any]:
    """The columns of a row: the counts, `roofline_seconds`, and the `bound` that sets it, compute or memory."""
    compute, memory = cost.scheduled_flops / chip.flops, cost.moved_bytes / chip.bandwidth
    return {
        **dataclasses.asdict(cost),
        "roofline_seconds": max(compute, memory),
        "bound": "compute" if compute >= memory else "memory",
    }


def of_op(point: Point, effective: backends.Effective, phase: str) -> Cost:
    """One attention; `phase` as in `op.PHASES`."""
    count = {"splash": _splash, "dot_product": _dense, "blockwise": _blockwise}[point.backend]
    forward, backward = count(point, effective)
    parts = {"forward": (forward,), "backward": (backward,), "forward_backward": (forward, backward)}[phase]
    copies = point.batch * point.heads
    flops = sum(products * 2 * pairs * point.head_width for products, pairs, _ in parts)
    return Cost(copies * flops, useful_flops(point, phase), copies * sum(moved for *_, moved in parts))


def of_matrices(params: Any, tokens: int, *, indexer_learns: bool, unused: tuple[str, ...] = ()) -> Cost:
    """Every matrix of a Haiku tree times every token: forward, and both products of the backward pass.

    Args:
      params: arrays or their shapes.
      tokens: that each matrix meets.
      indexer_learns: whether indexers have a backward pass.
      unused: parts of names of modules whose matrices are looked up, not multiplied.
    """
    flops = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if leaf.ndim > 1 and not any(part in name for part in unused):
            flops += 2 * tokens * math.prod(leaf.shape) * (3 if indexer_learns or "indexer" not in name else 1)
    return Cost(flops, flops, 0)


def of_index(batch: int, seq_len: int, entries: int, index_heads: int, index_width: int, *, learns: bool) -> Cost:
    """Scores of all entries, of which half are complete on average, written and read once; not what teaches them."""
    flops = 2 * batch * seq_len * entries * index_heads * index_width * (3 if learns else 1)
    return Cost(flops, flops / 2, 2 * _FLOAT32 * batch * seq_len * entries)


def _splash(point: Point, effective: backends.Effective):
    """Products, pairs and bytes of the forward and of the backward kernel, a head."""
    visibility = point.visibility
    lay, config = attend.kernel_of(visibility, point.seq_len, effective)
    (first, _), (second, _) = closed_form.schedules(lay, config)
    size, width = jnp.dtype(point.dtype).itemsize, point.head_width
    q_bytes, kv_bytes = lay.q_len * width * size, lay.kv_len * width * size

    def masks(schedule) -> int:
        loaded = effective["schedule"] != "computed"
        return loaded * int(np.count_nonzero(schedule.kinds == 1)) * schedule.block_q * schedule.block_kv

    def active(schedule) -> int:
        return int(np.count_nonzero(schedule.kinds))

    forward = 2 * q_bytes + active(first) * 2 * config.block_kv * width * size + masks(first)
    # The rows of a block of keys: q, d_out, and their float32 log-sum-exp and product.
    of_rows = config.block_q_dkv * (2 * width * size + 2 * _SUBLANES * _FLOAT32)
    backward = active(second) * of_rows + 2 * kv_bytes + 4 * lay.kv_len * width * _FLOAT32 + masks(second)
    if effective["dq_reduction_steps"] == 3:
        backward += active(second) * 2 * config.block_q_dkv * width * size + 4 * q_bytes
    else:
        partial_sums = effective["dq_partial_sums"] * lay.q_len * width * jnp.dtype(effective["dq_dtype"]).itemsize
        backward += 2 * partial_sums + q_bytes
    pairs = [active(schedule) * schedule.block_q * schedule.block_kv for schedule in (first, second)]
    return (PRODUCTS["forward"], pairs[0], forward), (PRODUCTS["backward"], pairs[1], backward)


def _dense(point: Point, effective: backends.Effective):
    del effective
    pairs = point.seq_len * (point.seq_len + point.visibility.num_entries(point.seq_len))
    logits = 2 * _FLOAT32 * pairs  # written and read
    return (PRODUCTS["forward"], pairs, 2 * logits), (PRODUCTS["backward"], pairs, 4 * logits)


def _blockwise(point: Point, effective: backends.Effective):
    visibility, block_q = point.visibility, effective["block_q"]
    ends = np.arange(block_q, point.seq_len + block_q, block_q)
    keys = np.full(len(ends), block_q + min(visibility.window, point.seq_len) - 1)
    if effective.get("schedule") == "gather":
        keys = keys + min(visibility.top_k, visibility.num_entries(point.seq_len))
    elif "block_kv" in effective:
        entries = np.minimum(visibility.num_entries(ends), visibility.num_entries(point.seq_len))
        keys = keys + -(-entries // effective["block_kv"]) * effective["block_kv"]
    row = point.head_width * jnp.dtype(point.dtype).itemsize
    pairs, once = int(keys.sum()) * block_q, 2 * point.seq_len * row
    shared = int(keys.sum()) * row / point.heads  # all heads of a block of queries meet the keys together
    return (PRODUCTS["forward"], pairs, once + shared), (PRODUCTS["backward"], pairs, 2 * once + 3 * shared)
