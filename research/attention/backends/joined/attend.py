"""Two flash attentions under one softmax: the local keys of blocks of queries, and the compressed entries. For GPUs.

Flash kernels for GPUs skip keys outside a query's range forward, but not backward: a window over a whole sequence is
quadratic there. So queries are cut into blocks, each a sequence of its own with the local keys that it can see, linear
in both passes; the entries are a second call. Its keys are a range of entries for HCA; CSA's choice is a mask, or is
gathered.

The parts are joined by their log-sum-exp and the sink's logit. The gradient of a part follows from the log-sum-exp and
the output over all keys (as in ring attention, Liu et al. 2023), so each part's own backward kernel serves.

A part is computed by tokamax's kernels, `mosaic` for Hopper or `triton`, or in plain XLA.

This file is not split: each step of the backward pass is the gradient of a step of the forward pass.
"""

import dataclasses
import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from research.attention import attend as attend_lib
from research.attention import visibility as visibility_lib
from research.attention.attend import Attend, Documents, Effective, Inputs, Pass, Sizes
from research.attention.backends.joined import xla
from research.attention.backends.joined.parts import NOTHING, Gradients, Joint, Part, Ranges, Softmax
from research.attention.indexer import selection
from research.attention.padding import pad, round_up
from research.attention.product import precision_name

SCHEDULES = ("stream", "gather")
_DEFAULT_BLOCK = 128  # of queries, and in plain XLA of keys
_MOSAIC_CHIPS = ("h100", "h200")
_MOSAIC_WIDTH = 256  # of a head; its tiles of wider ones exceed the shared memory
_MOSAIC_QUERIES = 128  # of a tile
# 'auto' gathers if there are at least this many entries: the mask takes their number times that of the queries.
_GATHER_FROM = 4096
_GATHERED_BYTES = 64 * 2**20  # of the entries that are gathered at once


def resolve(attend: Attend, sizes: Sizes) -> Effective:
    """See `attend.Backend`."""
    entries, options = attend.visibility.num_entries(sizes.seq_len), attend.options
    if not attend.visibility.bands:
        raise NotImplementedError(f"joined computes ranges of keys, which {attend.visibility.kind} has not")
    schedule = _schedule(attend, entries)
    kernel = _kernel(attend, sizes, schedule)
    in_xla = kernel == "xla"
    reads = ["flash_kernel", "block_q", *(["block_kv"] if in_xla else []), *(["schedule"] if schedule else [])]
    attend.refuse_unread(*reads)
    most = round_up(sizes.seq_len, _DEFAULT_BLOCK)
    for name in ("block_q", "block_kv"):
        if not 0 <= getattr(options, name) <= most:
            raise attend.error(name, f"0 (chosen for you) or between 1 and {most}")
    if kernel == "mosaic" and options.block_q % _MOSAIC_QUERIES:
        raise attend.error("block_q", f"0 (chosen for you) or a multiple of {_MOSAIC_QUERIES} with flash_kernel=mosaic")
    effective = {
        "flash_kernel": kernel,
        "block_q": options.block_q or _DEFAULT_BLOCK,
        "accumulation_dtype": "float32",
        "precision": precision_name(sizes.dtype),
    }
    if in_xla:
        effective["block_kv"] = options.block_kv or _DEFAULT_BLOCK
    if schedule:
        effective["schedule"] = schedule
    if kernel == "triton" and attend.target.platform != "gpu":
        effective["interpreted"] = True
    return effective


def _schedule(attend: Attend, entries: int) -> str:
    """The schedule of a visibility that selects; empty for others, which have no choice."""
    if not attend.visibility.selects or not entries:
        return ""
    if attend.schedule == "auto":
        return "gather" if entries >= max(_GATHER_FROM, 4 * attend.visibility.top_k) else "stream"
    if attend.schedule not in SCHEDULES:
        raise attend.error("schedule", f"auto or one of {', '.join(SCHEDULES)}")
    return attend.schedule


def _kernel(attend: Attend, sizes: Sizes, schedule: str) -> str:
    """The kernel in effect.

    Raises:
      NotImplementedError: the one that is asked for does not serve the chip, the width, the dtype or the schedule.
    """
    asked, target, dtype = attend.options.flash_kernel, attend.target, jnp.dtype(sizes.dtype)
    # Its tiles are 128 queries; a gathered part has those of one query's heads.
    fits = sizes.head_width <= _MOSAIC_WIDTH and dtype in (jnp.bfloat16, jnp.float16) and schedule != "gather"
    if asked == "auto":
        return "xla" if target.platform != "gpu" else "mosaic" if fits and target.chip in _MOSAIC_CHIPS else "triton"
    # A chip that is not known is left to the compiler.
    if asked == "mosaic" and not (fits and target.platform == "gpu" and target.chip in (*_MOSAIC_CHIPS, "")):
        chips = ", ".join(_MOSAIC_CHIPS)
        raise NotImplementedError(
            f"flash_kernel=mosaic serves {chips}, bfloat16, head widths up to {_MOSAIC_WIDTH}, and no gathered "
            f"entries; this is {target.chip or target.platform}, {dtype.name}, {sizes.head_width}"
            + (f" and schedule {schedule}" if schedule else "")
        )
    return asked


def prepare(attend: Attend, documents: Documents) -> None:
    """See `attend.Backend`. Calls share nothing."""
    del attend, documents


def compute(attend: Attend, effective: Effective, inputs: Inputs) -> Float[Array, "B S H D"]:
    """See `attend.Backend`."""
    q, (local, entries), segments = inputs.q, inputs.keys, inputs.documents.segments
    visibility, seq_len = attend.visibility, q.shape[1]
    plan = _Plan(
        effective["flash_kernel"],
        bool(effective.get("interpreted")),
        effective["block_q"],
        round_up(min(visibility.reach, seq_len) - 1, effective["block_q"]),
        effective.get("block_kv", _DEFAULT_BLOCK),
        # No batched product of bfloat16 into float32 in XLA's CPU backend; in float32 it is the same product.
        jnp.dtype(jnp.float32 if attend.target.platform == "cpu" else q.dtype),
    )
    after = round_up(seq_len, plan.block_q) - seq_len
    padded, local = (pad(x, 1, 0, after) for x in (q, local))
    starts = _document_starts(pad(segments, 1, 0, after, visibility_lib.PADDING))
    t = jnp.arange(seq_len + after, dtype=jnp.int32)[None]
    of_entries = None
    if entries.shape[1]:
        selected = None if inputs.selected is None else pad(inputs.selected, 1, 0, after, False)
        gathers = effective.get("schedule") == "gather"
        of_entries = _seen_entries(visibility, starts, t, selected, gathers=gathers)
    seen = _Seen(Ranges(*visibility.local_range(t, starts)), of_entries)
    return _attend(plan, padded, local, entries, seen, inputs.sinks)[:, :seq_len]


def cost(attend: Attend, sizes: Sizes, effective: Effective) -> tuple[Pass, Pass]:
    """See `attend.Backend`. Keys are read once per head and block of queries; of a range, forward, those within it."""
    visibility, block_q, seq_len = attend.visibility, effective["block_q"], sizes.seq_len
    q_len, entries = round_up(seq_len, block_q), visibility.num_entries(seq_len)
    local = round_up(min(visibility.reach, seq_len) - 1, block_q) + block_q
    seen = entries
    if effective.get("schedule") == "gather":
        seen = min(visibility.top_k, entries)
    row_bytes = sizes.head_width * jnp.dtype(sizes.dtype).itemsize
    keys = q_len // block_q * (local + seen)
    skips = not visibility.selects and effective["flash_kernel"] != "xla"
    complete = int(np.sum(visibility.num_entries(np.arange(1, seq_len + 1)))) if entries else 0
    forward_pairs = q_len * local + (complete if skips else q_len * seen)
    q_and_out = 2 * seq_len * row_bytes
    return (
        Pass(forward_pairs, q_and_out + keys * row_bytes),
        Pass(q_len * (local + seen), 2 * q_and_out + 3 * keys * row_bytes),
    )


class _Seen(NamedTuple):
    """Who sees what: local keys as tokens; entries as ranges, as booleans, or as the indices of those chosen."""

    local: Ranges
    entries: Ranges | Bool[Array, "B q_len C"] | Int32[Array, "B q_len K"] | None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How the parts are computed; `before` is the number of keys before a block of queries that are given to it."""

    kernel: str
    interpreted: bool
    block_q: int
    before: int
    block_kv: int
    dtype: np.dtype

    def forward(self, part: Part) -> Softmax:
        """Attends to a part."""
        if self.kernel == "xla":
            return xla.forward(self._cast(part), self.block_kv)
        return _kernels().forward(self.kernel, part, interpreted=self.interpreted)

    def backward(self, part: Part, joint: Joint) -> Gradients:
        """The share of a part in the gradients."""
        if self.kernel == "xla":
            return xla.backward(self._cast(part), joint._replace(d_out=joint.d_out.astype(self.dtype)), self.block_kv)
        return _kernels().backward(self.kernel, part, joint, interpreted=self.interpreted)

    def local_part(self, q: Shaped[Array, "B q_len H D"], local: Shaped[Array, "B q_len D"], ranges: Ranges) -> Part:
        """Blocks of queries as sequences of their own, with the local keys that they can see."""
        blocks = q.shape[1] // self.block_q
        offset = jnp.arange(blocks, dtype=jnp.int32)[None, :, None] * self.block_q - self.before
        folded = (jnp.maximum(x.reshape(-1, blocks, self.block_q) - offset, 0) for x in ranges)
        return Part(self.fold(q), self.overlapping(local), Ranges(*(x.reshape(-1, self.block_q) for x in folded)))

    def fold(self, x: Shaped[Array, "B q_len *rest"]) -> Shaped[Array, "sequences block_q *rest"]:
        """Blocks of queries, as many more sequences."""
        return x.reshape(-1, self.block_q, *x.shape[2:])

    def overlapping(self, local: Shaped[Array, "B q_len D"]) -> Shaped[Array, "sequences kv_len D"]:
        """The local keys of each block of queries, and those before it. Linear in `local`."""
        blocks = local.reshape(len(local), -1, self.block_q, local.shape[-1])
        back = self.before // self.block_q
        padded = pad(blocks, 1, back, 0)
        shifted = [padded[:, i : i + blocks.shape[1]] for i in range(back + 1)]
        return jnp.concatenate(shifted, axis=2).reshape(-1, self.before + self.block_q, local.shape[-1])

    def _cast(self, part: Part) -> Part:
        return part._replace(q=part.q.astype(self.dtype), keys=part.keys.astype(self.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: _Plan,
    q: Float[Array, "B q_len H D"],
    local: Float[Array, "B q_len D"],
    entries: Float[Array, "B C D"],
    seen: _Seen,
    sinks: Float32[Array, " H"] | None,
) -> Float[Array, "B q_len H D"]:
    return _forward(plan, q, local, entries, seen, sinks)[0]


def _forward(
    plan: _Plan,
    q: Float[Array, "B q_len H D"],
    local: Float[Array, "B q_len D"],
    entries: Float[Array, "B C D"],
    seen: _Seen,
    sinks: Float32[Array, " H"] | None,
) -> tuple[Float[Array, "B q_len H D"], Float32[Array, "B q_len H"]]:
    """Output and log-sum-exp over all keys and the sink."""
    found = plan.forward(plan.local_part(q, local, seen.local))
    parts = [Softmax(*(x.reshape(*q.shape[:3], *x.shape[3:]) for x in found))]
    if seen.entries is not None:
        parts.append(_forward_entries(plan, q, entries, seen.entries))
    logsumexp = functools.reduce(jnp.logaddexp, [part.logsumexp for part in parts])
    if sinks is not None:
        logsumexp = jnp.logaddexp(logsumexp, sinks[None, None])
        logsumexp = jnp.where(logsumexp == jnp.inf, jnp.nan, logsumexp)
    out = sum(part.out * jnp.exp(part.logsumexp - logsumexp)[..., None] for part in parts)
    return attend_lib.saved(out.astype(q.dtype), logsumexp)


def _forward_entries(
    plan: _Plan,
    q: Float[Array, "B q_len H D"],
    entries: Float[Array, "B C D"],
    seen: Ranges | Shaped[Array, "B q_len _"],
) -> Softmax:
    if not _gathers(seen):
        return plan.forward(Part(q, entries, seen))

    def of_queries(xs: tuple[Array, Array]) -> Softmax:
        return plan.forward(_gathered_part(*xs, entries))

    out, logsumexp = jax.lax.map(of_queries, _in_groups((q, seen), entries))
    return Softmax(*(_rejoined(x, q) for x in (out, logsumexp)))


def _attend_forward(plan: _Plan, *arguments: Any) -> tuple[Float[Array, "B q_len H D"], tuple]:
    out, logsumexp = _forward(plan, *arguments)
    return out, (*arguments, out, logsumexp)


def _attend_backward(plan: _Plan, residuals: tuple, d_out: Float[Array, "B q_len H D"]) -> tuple:
    q, local, entries, seen, sinks, out, logsumexp = residuals
    # A query that sees no key has no weights; one that only has a sink neither, by its log-sum-exp.
    joint = Joint(out, jnp.where(logsumexp > NOTHING / 2, logsumexp, -NOTHING), d_out)
    part = plan.local_part(q, local, seen.local)
    found = plan.backward(part, Joint(*map(plan.fold, joint)))
    d_q = found.d_q.reshape(q.shape).astype(jnp.float32)
    float_local = jax.ShapeDtypeStruct(local.shape, jnp.float32)
    (d_local,) = jax.linear_transpose(plan.overlapping, float_local)(found.d_keys.astype(jnp.float32))
    d_entries = jnp.zeros(entries.shape, jnp.float32)
    if seen.entries is not None:
        d_q_part, d_entries = _backward_entries(plan, q, entries, seen.entries, joint)
        d_q += d_q_part
    d_sinks = None
    if sinks is not None:
        delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(axis=-1)
        d_sinks = -jnp.sum(jnp.exp(sinks[None, None] - logsumexp) * delta, axis=(0, 1))
    return d_q.astype(q.dtype), d_local.astype(local.dtype), d_entries.astype(entries.dtype), None, d_sinks


_attend.defvjp(_attend_forward, _attend_backward)


def _backward_entries(
    plan: _Plan,
    q: Float[Array, "B q_len H D"],
    entries: Float[Array, "B C D"],
    seen: Ranges | Shaped[Array, "B q_len _"],
    joint: Joint,
) -> tuple[Float32[Array, "B q_len H D"], Float32[Array, "B C D"]]:
    if not _gathers(seen):
        return plan.backward(Part(q, entries, seen), joint)

    def of_queries(d_entries: Array, xs: tuple) -> tuple[Array, Array]:
        q, indices, joint = xs
        part = _gathered_part(q, indices, entries)
        found = plan.backward(part, Joint(*map(_heads_as_queries, joint)))
        d_keys = found.d_keys.reshape(*indices.shape, -1).astype(jnp.float32)
        batch = jnp.arange(len(indices), dtype=jnp.int32)[:, None, None]
        return d_entries.at[batch, indices].add(d_keys, mode="drop"), found.d_q

    zeros = jnp.zeros(entries.shape, jnp.float32)
    d_entries, d_q = jax.lax.scan(of_queries, zeros, _in_groups((q, seen, joint), entries))
    return _rejoined(d_q, q), d_entries


def _gathers(seen: Ranges | Shaped[Array, "B q_len _"]) -> bool:
    return not isinstance(seen, Ranges) and seen.dtype == jnp.int32


def _gathered_part(
    q: Float[Array, "B group heads D"], indices: Int32[Array, "B group K"], entries: Float[Array, "B C D"]
) -> Part:
    """Every query a sequence of its own, of its heads, with the entries at its indices."""
    num_entries, size = entries.shape[1], indices.shape[-1]
    batch = jnp.arange(len(indices), dtype=jnp.int32)[:, None, None]
    keys = entries.at[batch, indices].get(mode="fill", fill_value=0)
    end = (indices < num_entries).sum(axis=-1, dtype=jnp.int32).reshape(-1, 1)
    end = jnp.broadcast_to(end, (len(end), q.shape[2]))
    folded = _heads_as_queries(q)
    return Part(folded, keys.reshape(-1, size, keys.shape[-1]), Ranges(jnp.zeros_like(end), end))


def _heads_as_queries(x: Shaped[Array, "B group heads *rest"]) -> Shaped[Array, "sequences heads 1 *rest"]:
    return x.reshape(-1, x.shape[2], 1, *x.shape[3:])


def _in_groups(tree: tuple, entries: Float[Array, "B C D"]) -> tuple:
    """Groups of queries, as many as may be gathered for at once, along a new first axis."""
    (batch, length), size = tree[0].shape[:2], tree[1].shape[-1]
    rows = max(_GATHERED_BYTES // (batch * size * entries.shape[-1] * entries.dtype.itemsize), 1)
    at_once = max(n for n in range(1, length + 1) if length % n == 0 and n <= rows)
    split = (x.reshape(batch, -1, at_once, *x.shape[2:]) for x in jax.tree.leaves(tree))
    return jax.tree.unflatten(jax.tree.structure(tree), [jnp.moveaxis(x, 1, 0) for x in split])


def _rejoined(
    x: Shaped[Array, "groups sequences H 1 *rest"], q: Float[Array, "B q_len H D"]
) -> Shaped[Array, "B q_len H *rest"]:
    """The inverse of `_in_groups` and `_heads_as_queries`."""
    x = x.reshape(len(x), len(q), -1, x.shape[2], *x.shape[4:])
    return jnp.moveaxis(x, 0, 1).reshape(*q.shape[:3], *x.shape[4:])


def _seen_entries(
    visibility: visibility_lib.HeavilyCompressed,
    starts: Int32[Array, "B q_len"],
    t: Int32[Array, "1 q_len"],
    selected: Bool[Array, "B q_len C"] | None,
    *,
    gathers: bool,
) -> Ranges | Bool[Array, "B q_len C"] | Int32[Array, "B q_len K"]:
    ranges = Ranges(*visibility.entry_range(t, starts))
    if selected is None:
        return ranges
    c = jnp.arange(selected.shape[-1], dtype=jnp.int32)[None, None]
    chosen = selected & (c >= ranges.first[..., None]) & (c < ranges.end[..., None])
    if gathers:
        return selection.indices(chosen, min(visibility.top_k, c.size))
    return selection.at_most(chosen, visibility.top_k)


def _document_starts(segments: Int32[Array, "B q_len"]) -> Int32[Array, "B q_len"]:
    """The first token of each token's document, `PADDING` at padding. A document's tokens are consecutive."""
    tokens = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    begins = pad(segments[:, 1:] != segments[:, :-1], 1, 1, 0, True)
    starts = jax.lax.cummax(jnp.where(begins, tokens, 0), axis=1)
    return jnp.where(segments >= 0, starts, visibility_lib.PADDING)


def _kernels() -> types.ModuleType:
    """Imported on first use: importing tokamax takes a second."""
    from research.attention.backends.joined import kernels

    return kernels
