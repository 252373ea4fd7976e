"""Block-wise attention in plain XLA, by the recurrences of flash attention (Dao et al. 2022).

A block of queries attends to the local keys in its window, then to the compressed entries. There are two schedules:

* `stream` visits the entries in blocks, up to the last entry that is complete at the block of queries.
* `gather`, for CSA only, gathers the selected entries of each query. An entry costs more than in a stream, but entries
  that are not selected cost nothing.

Both passes are written by hand. The backward pass recomputes the logits from their log-sum-exp, so the only residuals
beside inputs and output are [B, S, H]. Queries keep the order [S, H, D]: since all heads share the keys, a block of
queries is one matrix of Q * H rows.

This file is not split: each step of the backward pass is the gradient of a step of the forward pass.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from research.attention import attend as attend_lib
from research.attention import visibility as visibility_lib
from research.attention.attend import Attend, Documents, Effective, Inputs, Pass, Sizes
from research.attention.backends.dot_product import MASK_VALUE
from research.attention.indexer import selection
from research.attention.padding import pad, round_up
from research.attention.product import precision_name, product

# The fastest of 16 to 128, and of 64 to 512, on a CPU (LOG.md). Not tuned for a GPU.
_DEFAULT_BLOCK_Q = 32
_DEFAULT_BLOCK_KV = 64
SCHEDULES = ("stream", "gather")
# 'auto' gathers if there are at least this many times `top_k` entries (LOG.md).
_GATHER_FROM = 4
# The initial value of the running maximum. Above MASK_VALUE, so that masked logits have weight 0 in empty rows.
_INITIAL_MAX = -1e30

Scalar = Int32[Array, ""]  # an index inside the program
# The padded "local" keys and "entries" of a sequence.
PaddedKeys = dict[str, Float[Array, "_ D"]]
# The inputs of the masks of a sequence: "segments" of the queries, "local_segments", "entry_segments", and "selected"
# entries as booleans or "indices".
MaskInputs = dict[str, Int32[Array, "..."] | Bool[Array, "..."]]
# Keys of a block of queries: the same for all of them, or different.
BlockKeys = Float[Array, "N D"] | Float[Array, "Q N D"]
# The running softmax: maximum, sum of the weights, weighted sum of the values.
Softmax = tuple[Float32[Array, "Q H 1"], Float32[Array, "Q H 1"], Float32[Array, "Q H D"]]
# q, keys, inputs of the masks, sinks, output, log-sum-exp.
Residuals = tuple[
    Float[Array, "q_len H D"],
    PaddedKeys,
    MaskInputs,
    Float32[Array, " H"] | None,
    Float[Array, "q_len H D"],
    Float32[Array, "q_len H"],
]


def resolve(attend: Attend, sizes: Sizes) -> Effective:
    """See `attend.Backend`. `block_kv` is the number of entries in a block of the stream."""
    entries = attend.visibility.num_entries(sizes.seq_len)
    schedule = _schedule(attend, entries)
    streams = entries and schedule != "gather"
    attend.refuse_unread("block_q", *(("block_kv",) if streams else ()), *(("schedule",) if schedule else ()))
    options = attend.options
    for name, length in (("block_q", sizes.seq_len), ("block_kv", max(entries, 1))):
        if not 0 <= getattr(options, name) <= length:
            raise attend.error(name, f"0 (chosen for you) or between 1 and {length}")
    effective = {
        "block_q": options.block_q or min(_DEFAULT_BLOCK_Q, sizes.seq_len),
        "accumulation_dtype": "float32",
        "precision": precision_name(sizes.dtype),
    }
    if schedule:
        effective["schedule"] = schedule
    if streams:
        effective["block_kv"] = options.block_kv or min(_DEFAULT_BLOCK_KV, entries)
    return effective


def _schedule(attend: Attend, entries: int) -> str:
    """The schedule of a visibility that selects; empty for others, which have no choice."""
    if not attend.visibility.selects or not entries:
        return ""
    if attend.schedule == "auto":
        return "gather" if entries >= _GATHER_FROM * attend.visibility.top_k else "stream"
    if attend.schedule not in SCHEDULES:
        raise attend.error("schedule", f"auto or one of {', '.join(SCHEDULES)}")
    return attend.schedule


def prepare(attend: Attend, documents: Documents) -> None:
    """See `attend.Backend`. Calls share nothing."""
    del attend, documents


def compute(attend: Attend, effective: Effective, inputs: Inputs) -> Float[Array, "B S H D"]:
    """See `attend.Backend`."""
    q, segments, selected, visibility = inputs.q, inputs.documents.segments, inputs.selected, attend.visibility
    plan = _Plan(visibility, *q.shape[1:3], effective["block_q"], effective.get("block_kv", 1))
    keys = {"local": plan.pad_local(inputs.keys.local), "entries": plan.pad_entries(inputs.keys.compressed, axis=1)}
    mask_inputs = {
        "segments": plan.pad_tokens(segments, visibility_lib.PADDING),
        "local_segments": plan.pad_local(segments, visibility_lib.PADDING),
    }
    if plan.entries:
        entry_segments = visibility_lib.entry_segments(segments, visibility.ratio)
        mask_inputs["entry_segments"] = plan.pad_entries(entry_segments, axis=1, value=visibility_lib.STRADDLES)
    if effective.get("schedule") == "gather":
        padded = plan.pad_tokens(selected, False)
        mask_inputs["indices"] = jax.lax.map(lambda args: plan.selected_indices(*args), (padded, mask_inputs))
    elif selected is not None:
        selected = selection.capped(visibility, segments, selected)  # `gather` attends to at most K entries, too
        mask_inputs["selected"] = plan.pad_entries(plan.pad_tokens(selected, False), axis=2, value=False)
    out = jax.lax.map(lambda args: _attend(plan, *args, inputs.sinks), (plan.pad_tokens(q, 0), keys, mask_inputs))
    return out[:, : q.shape[1]]


def cost(attend: Attend, sizes: Sizes, effective: Effective) -> tuple[Pass, Pass]:
    """See `attend.Backend`. The keys of a block of queries are read once for all heads."""
    visibility, block_q, seq_len = attend.visibility, effective["block_q"], sizes.seq_len
    ends = np.arange(block_q, seq_len + block_q, block_q)
    keys = np.full(len(ends), block_q + min(visibility.reach, seq_len) - 1)
    if effective.get("schedule") == "gather":
        keys = keys + min(visibility.top_k, visibility.num_entries(seq_len))
    elif "block_kv" in effective:
        entries = np.minimum(visibility.num_entries(ends), visibility.num_entries(seq_len))
        keys = keys + -(-entries // effective["block_kv"]) * effective["block_kv"]
    row_bytes = sizes.head_width * jnp.dtype(sizes.dtype).itemsize
    pairs, q_and_out = int(keys.sum()) * block_q, 2 * seq_len * row_bytes
    key_bytes = int(keys.sum()) * row_bytes / sizes.heads
    return Pass(pairs, q_and_out + key_bytes), Pass(pairs, 2 * q_and_out + 3 * key_bytes)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The sizes of a sequence and of its blocks.

    Queries and local keys are padded to whole blocks of queries, local keys also by `reach` on the left, and entries to
    whole blocks of entries.
    """

    visibility: visibility_lib.Visibility
    seq_len: int
    heads: int
    block_q: int
    block_kv: int

    @property
    def entries(self) -> int:
        return self.visibility.num_entries(self.seq_len)

    @property
    def reach(self) -> int:
        """Number of local keys before a block that its first query may see."""
        return min(self.visibility.reach, self.seq_len) - 1

    @property
    def q_len(self) -> int:
        return round_up(self.seq_len, self.block_q)

    def pad_tokens(self, x: Shaped[Array, "B S *rest"], value: float) -> Shaped[Array, "B q_len *rest"]:
        """Pads tokens to whole blocks of queries."""
        return pad(x, 1, 0, self.q_len - self.seq_len, value)

    def pad_local(self, x: Shaped[Array, "B S *rest"], value: float = 0) -> Shaped[Array, "B padded *rest"]:
        """Pads tokens by `reach` on the left, and as `pad_tokens` on the right."""
        return pad(x, 1, self.reach, self.q_len - self.seq_len, value)

    def pad_entries(self, x: Shaped[Array, "..."], axis: int, value: float = 0) -> Shaped[Array, "..."]:
        """Pads `axis` from C to whole blocks of entries."""
        return pad(x, axis, 0, round_up(self.entries, self.block_kv) - self.entries, value)

    def num_steps(self, block: Scalar) -> Scalar:
        """Number of blocks of entries that a block of queries may see."""
        complete = self.visibility.num_entries((block + 1) * self.block_q)
        return jnp.minimum(-(-complete // self.block_kv), -(-self.entries // self.block_kv))

    def local_mask(self, block: Scalar, mask_inputs: MaskInputs) -> Bool[Array, "Q 1 N"]:
        """The mask of a block of queries over its `reach + Q` local keys."""
        start = block * self.block_q
        t = start + jnp.arange(self.block_q)[:, None]
        j = start - self.reach + jnp.arange(self.reach + self.block_q)[None]
        query_segments = _slice(mask_inputs["segments"], start, self.block_q)[:, None]
        key_segments = _slice(mask_inputs["local_segments"], start, self.reach + self.block_q)[None]
        return self.visibility.local_mask(t, j, query_segments, key_segments)[:, None]

    def entry_mask(self, block: Scalar, step: Scalar | int, mask_inputs: MaskInputs) -> Bool[Array, "Q 1 N"]:
        """The mask of a block of queries over a block of entries."""
        start, first = block * self.block_q, step * self.block_kv
        t = start + jnp.arange(self.block_q)[:, None]
        c = first + jnp.arange(self.block_kv)[None]
        query_segments = _slice(mask_inputs["segments"], start, self.block_q)[:, None]
        entry_segments = _slice(mask_inputs["entry_segments"], first, self.block_kv)[None]
        selected = None
        if "selected" in mask_inputs:
            selected = jax.lax.dynamic_slice(mask_inputs["selected"], (start, first), (self.block_q, self.block_kv))
        return self.visibility.entry_mask(t, c, query_segments, entry_segments, selected)[:, None]

    def selected_indices(self, selected: Bool[Array, "q_len C"], mask_inputs: MaskInputs) -> Int32[Array, "q_len K"]:
        """Indices of the visible selected entries of each query, ascending; C after the last one."""
        size = min(self.visibility.top_k, self.entries)
        one_step = dataclasses.replace(self, block_kv=self.entries)

        def block_indices(block: Scalar) -> Int32[Array, "Q K"]:
            block_selected = _slice(selected, block * self.block_q, self.block_q)
            return selection.indices(one_step.entry_mask(block, 0, mask_inputs)[:, 0] & block_selected, size)

        return jax.lax.map(block_indices, jnp.arange(self.q_len // self.block_q)).reshape(-1, size)

    def gather(
        self, block: Scalar, keys: PaddedKeys, mask_inputs: MaskInputs
    ) -> tuple[Int32[Array, "Q K"], Float[Array, "Q K D"], Bool[Array, "Q 1 K"]]:
        """The selected indices of a block of queries, the entries at them, and the mask of those that exist."""
        indices = _slice(mask_inputs["indices"], block * self.block_q, self.block_q)
        entries = keys["entries"].at[indices].get(mode="fill", fill_value=0)
        return indices, entries, (indices < self.entries)[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: _Plan,
    q: Float[Array, "q_len H D"],
    keys: PaddedKeys,
    mask_inputs: MaskInputs,
    sinks: Float32[Array, " H"] | None,
) -> Float[Array, "q_len H D"]:
    """Attention of one sequence."""
    return _forward(plan, q, keys, mask_inputs, sinks)[0]


def _forward(
    plan: _Plan,
    q: Float[Array, "q_len H D"],
    keys: PaddedKeys,
    mask_inputs: MaskInputs,
    sinks: Float32[Array, " H"] | None,
) -> tuple[Float[Array, "q_len H D"], Float32[Array, "q_len H"]]:
    """Output and log-sum-exp of one sequence."""
    width = q.shape[-1]

    def attend_block(
        _: None, xs: tuple[Scalar, Float[Array, "Q H D"]]
    ) -> tuple[None, tuple[Float[Array, "Q H D"], Float32[Array, "Q H"]]]:
        block, q_block = xs
        row_max = jnp.full((plan.block_q, plan.heads, 1), _INITIAL_MAX)
        row_sum = jnp.zeros_like(row_max)
        if sinks is not None:
            sink = sinks[None, :, None]
            row_max = jnp.maximum(row_max, sink)  # at least _INITIAL_MAX, also if the sink is -inf
            row_sum = jnp.exp(sink - row_max)
        softmax = (row_max, row_sum, jnp.zeros((plan.block_q, plan.heads, width)))
        local = _slice(keys["local"], block * plan.block_q, plan.reach + plan.block_q)
        softmax = _accumulate(softmax, q_block, local, plan.local_mask(block, mask_inputs))
        if "indices" in mask_inputs:
            _, entries, mask = plan.gather(block, keys, mask_inputs)
            softmax = _accumulate(softmax, q_block, entries, mask)
        elif plan.entries:

            def attend_entries(step: Scalar, softmax: Softmax) -> Softmax:
                entries = _slice(keys["entries"], step * plan.block_kv, plan.block_kv)
                return _accumulate(softmax, q_block, entries, plan.entry_mask(block, step, mask_inputs))

            softmax = jax.lax.fori_loop(0, plan.num_steps(block), attend_entries, softmax)
        row_max, row_sum, out = softmax
        row_sum = jnp.where(row_sum == 0.0, 1.0, row_sum)
        return None, ((out / row_sum).astype(q.dtype), (row_max + jnp.log(row_sum))[..., 0])

    blocks = q.shape[0] // plan.block_q
    _, (out, logsumexp) = jax.lax.scan(attend_block, None, (jnp.arange(blocks), _split(q, plan.block_q)))
    return out.reshape(q.shape), logsumexp.reshape(q.shape[:-1])


def _accumulate(softmax: Softmax, q: Float[Array, "Q H D"], keys: BlockKeys, mask: Bool[Array, "Q 1 N"]) -> Softmax:
    """Adds keys to the running softmax."""
    row_max, row_sum, out = softmax
    axes = "kd" if keys.ndim == 2 else "qkd"
    logits = jnp.where(mask, _dot(f"qhd,{axes}->qhk", q, keys) * _scale(keys), MASK_VALUE)
    new_max = jnp.maximum(row_max, logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - new_max)
    decay = jnp.exp(row_max - new_max)
    row_sum = row_sum * decay + weights.sum(axis=-1, keepdims=True)
    return new_max, row_sum, out * decay + _dot(f"qhk,{axes}->qhd", weights.astype(keys.dtype), keys)


def _attend_forward(
    plan: _Plan,
    q: Float[Array, "q_len H D"],
    keys: PaddedKeys,
    mask_inputs: MaskInputs,
    sinks: Float32[Array, " H"] | None,
) -> tuple[Float[Array, "q_len H D"], Residuals]:
    out, logsumexp = attend_lib.saved(*_forward(plan, q, keys, mask_inputs, sinks))
    return out, (q, keys, mask_inputs, sinks, out, logsumexp)


def _attend_backward(
    plan: _Plan, residuals: Residuals, d_out: Float[Array, "q_len H D"]
) -> tuple[Float[Array, "q_len H D"], PaddedKeys, None, Float32[Array, " H"] | None]:
    q, keys, mask_inputs, sinks, out, logsumexp = residuals
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)

    def differentiate_block(
        d_keys: PaddedKeys,
        xs: tuple[Scalar, Float[Array, "Q H D"], Float[Array, "Q H D"], Float32[Array, "Q H"], Float32[Array, "Q H"]],
    ) -> tuple[PaddedKeys, Float[Array, "Q H D"]]:
        block, q_block, d_out_block, logsumexp_block, delta_block = xs
        block_args = (q_block, d_out_block, logsumexp_block[..., None], delta_block[..., None])
        local = _slice(keys["local"], block * plan.block_q, plan.reach + plan.block_q)
        d_q, d_local = _gradients(*block_args, local, plan.local_mask(block, mask_inputs))
        d_keys["local"] = _add_slice(d_keys["local"], d_local, block * plan.block_q)
        if "indices" in mask_inputs:
            indices, entries, mask = plan.gather(block, keys, mask_inputs)
            d_q_part, d_entries = _gradients(*block_args, entries, mask)
            d_q += d_q_part
            d_keys["entries"] = d_keys["entries"].at[indices].add(d_entries, mode="drop")
        elif plan.entries:

            def differentiate_entries(
                step: Scalar, carry: tuple[Float32[Array, "Q H D"], Float32[Array, "_ D"]]
            ) -> tuple[Float32[Array, "Q H D"], Float32[Array, "_ D"]]:
                d_q, d_entries = carry
                entries = _slice(keys["entries"], step * plan.block_kv, plan.block_kv)
                d_q_part, d_block = _gradients(*block_args, entries, plan.entry_mask(block, step, mask_inputs))
                return d_q + d_q_part, _add_slice(d_entries, d_block, step * plan.block_kv)

            steps = plan.num_steps(block)
            d_q, d_keys["entries"] = jax.lax.fori_loop(0, steps, differentiate_entries, (d_q, d_keys["entries"]))
        return d_keys, d_q.astype(q.dtype)

    blocks = [_split(x, plan.block_q) for x in (q, d_out, logsumexp, delta)]
    d_keys = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), keys)
    d_keys, d_q = jax.lax.scan(differentiate_block, d_keys, (jnp.arange(len(blocks[0])), *blocks))
    d_keys = jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), d_keys, keys)
    d_sinks = None if sinks is None else -jnp.sum(jnp.exp(sinks[None] - logsumexp) * delta, axis=0)
    return d_q.reshape(q.shape), d_keys, None, d_sinks


_attend.defvjp(_attend_forward, _attend_backward)


def _gradients(
    q: Float[Array, "Q H D"],
    d_out: Float[Array, "Q H D"],
    logsumexp: Float32[Array, "Q H 1"],
    delta: Float32[Array, "Q H 1"],
    keys: BlockKeys,
    mask: Bool[Array, "Q 1 N"],
) -> tuple[Float32[Array, "Q H D"], Float32[Array, "N D"] | Float32[Array, "Q N D"]]:
    """Gradients of queries, and of keys as keys and as values; `delta` is the sum of `out * d_out` over D."""
    axes = "kd" if keys.ndim == 2 else "qkd"
    logits = jnp.where(mask, _dot(f"qhd,{axes}->qhk", q, keys) * _scale(keys), MASK_VALUE)
    weights = jnp.exp(logits - logsumexp)
    d_logits = weights * (_dot(f"qhd,{axes}->qhk", d_out, keys) - delta) * _scale(keys)
    weights, d_logits = weights.astype(keys.dtype), d_logits.astype(keys.dtype)
    d_keys = _dot(f"qhk,qhd->{axes}", weights, d_out) + _dot(f"qhk,qhd->{axes}", d_logits, q)
    return _dot(f"qhk,{axes}->qhd", d_logits, keys), d_keys


_dot = functools.partial(product, out_dtype=jnp.float32)


def _scale(keys: BlockKeys) -> float:
    """1 / sqrt(D). It scales the float32 logits, not q, which would be rounded to q's dtype."""
    return keys.shape[-1] ** -0.5


def _split(x: Shaped[Array, " length *rest"], size: int) -> Shaped[Array, "blocks size *rest"]:
    return x.reshape(-1, size, *x.shape[1:])


def _slice(x: Shaped[Array, " length *rest"], start: Scalar | int, size: int) -> Shaped[Array, " size *rest"]:
    return jax.lax.dynamic_slice_in_dim(x, start, size)


def _add_slice(
    x: Float32[Array, " length *rest"], update: Float32[Array, " size *rest"], start: Scalar | int
) -> Float32[Array, " length *rest"]:
    return jax.lax.dynamic_update_slice_in_dim(x, _slice(x, start, len(update)) + update, start, axis=0)
