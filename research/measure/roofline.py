"""A model, not a measurement: how long a chip needs at best, by its peak FLOP/s and by its memory's bandwidth.

Counted of an attention: the products over all scheduled blocks, visible or not, and the blocks that the kernel moves
between HBM and the core, from its index maps. Around it, every matrix times every token, and what enters and leaves the
program once. Softmax, norms and the latency of a kernel's steps are not counted. CSA's blocks depend on the indexer;
counted are all that it could reach.
"""

import dataclasses
from typing import Any

import haiku as hk

from research.attention.spec import Spec
from research.hardware import Chip
from research.measure.op import PRODUCTS, Op
from research.training.flops import multiplied
from research.training.optimizer import group

_FLOAT32 = 4


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


def op_cost(op: Op, phase: str) -> Cost:
    """One attention; `phase` as in `op.PRODUCTS`."""
    forward, backward = op.attend.cost(op.sizes)
    parts = {"forward": forward, "backward": backward}
    if phase in parts:
        parts = {phase: parts[phase]}
    copies = op.batch * op.sizes.heads
    flops = sum(PRODUCTS[name] * 2 * one.pairs * op.sizes.head_width for name, one in parts.items())
    return Cost(copies * flops, op.useful_flops(phase), copies * sum(one.moved_bytes for one in parts.values()))


def attention_cost(spec: Spec) -> Cost:
    """Forward and backward of all layers' attentions, with their indexers."""
    cost, settings = Cost(0, 0, 0), spec.settings
    for kind in settings.model.all_layers:
        cost += op_cost(Op.make(spec, kind), "forward_backward")
        if spec.visibility(kind).selects:
            cost += index_cost(spec)
    return cost


def matrices_cost(spec: Spec, params: hk.Params) -> Cost:
    """Every matrix times the tokens that meet it: forward, and both products of the backward pass.

    Args:
      spec: the model.
      params: arrays or their shapes.
    """
    tokens, flops = spec.settings.data.batch_size * spec.settings.data.seq_len, 0
    for module, name, leaf in hk.data_structures.traverse(params):
        passes = 3 if spec.trains_indexer or group(module, name) != "indexer" else 1
        flops += 2 * tokens * leaf.size * multiplied(spec, module, name) * passes
    return Cost(flops, flops, 0)


def index_cost(spec: Spec) -> Cost:
    """Scores of all entries, of which half are complete on average, written and read once; not what teaches them."""
    attention, data = spec.settings.attention, spec.settings.data
    pairs = data.batch_size * data.seq_len * spec.selection.num_entries(data.seq_len)
    passes = 3 if spec.trains_indexer else 1
    flops = 2 * pairs * attention.index_heads * attention.index_head_width * passes
    return Cost(flops, flops / 2, 2 * _FLOAT32 * pairs)
