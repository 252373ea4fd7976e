"""Linear-cost attention in plain XLA: each block of queries meets the band of local keys it can see, and a stream of
blocks of compressed entries that ends with the last one complete. CSA's queries may instead gather the entries they
selected, each its own: an entry costs more that way, and most that are not selected cost nothing.

Both passes are written by hand (flash attention's recurrences, Dao et al. 2022): the backward pass recomputes the
logits of a block from its log-sum-exp, so that beside inputs and outputs nothing grows with S but [B, S, H] numbers.
Queries keep their [S, H, D] order: a block of them is one matrix of block_q * H rows against the shared keys.

One file, for the two passes read side by side: each step of the one is undone by a step of the other.
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

# The fastest of 16 to 128 and 64 to 512 on a CPU (LOG.md); not tuned for a GPU.
_DEFAULT_BLOCK_Q = 32
_DEFAULT_BLOCK_KV = 64
SCHEDULES = ("stream", "gather")  # of CSA: all entries in blocks, or each query's own
# CSA gathers the selected entries once there are this many times as many as it selects (LOG.md).
_GATHER_FROM = 4
# Where the running maximum starts. Above MASK_VALUE, so that a masked logit has weight 0 in a row that sees nothing.
_LOWEST_PEAK = -1e30

Arrays = dict[str, Array]  # the padded keys of a sequence, "local" and "entries"
Rows = dict[str, Array]  # of a sequence: "segments", "local_segments", "entry_segments", and "picked" or "selected"
SomeKeys = Float[Array, "n D"] | Float[Array, "block_q n D"]  # for all queries of a block, or each query's own
# Of the running softmax: peak and total [block_q, H, 1], and the weighted sum [block_q, H, D]; float32.
State = tuple[Array, Array, Array]


def resolve(attend: Attend, sizes: Sizes) -> Effective:
    """See `attend.Backend`. `block_kv` is entries per step of the stream; what selects has two schedules."""
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
    """How selected entries are visited; empty for other visibilities, which have one way."""
    if not attend.visibility.selects or not entries:
        return ""
    if attend.schedule == "auto":
        return "gather" if entries >= _GATHER_FROM * attend.visibility.top_k else "stream"
    if attend.schedule not in SCHEDULES:
        raise attend.error("schedule", f"auto or one of {', '.join(SCHEDULES)}")
    return attend.schedule


def prepare(attend: Attend, documents: Documents) -> None:
    """See `attend.Backend`. Nothing here is worth sharing."""
    del attend, documents


def compute(attend: Attend, effective: Effective, inputs: Inputs) -> Float[Array, "B S H D"]:
    """See `attend.Backend`."""
    q, segments, selected, visibility = inputs.q, inputs.documents.segments, inputs.selected, attend.visibility
    plan = _Plan(visibility, *q.shape[1:3], effective["block_q"], effective.get("block_kv", 1))
    keys = {"local": plan.pad_local(inputs.keys.local), "entries": plan.pad_entries(inputs.keys.compressed, axis=1)}
    rows = {
        "segments": plan.pad_tokens(segments, visibility_lib.PADDING),
        "local_segments": plan.pad_local(segments, visibility_lib.PADDING),
    }
    if plan.entries:
        of_entry = visibility_lib.entry_segments(segments, visibility.ratio)
        rows["entry_segments"] = plan.pad_entries(of_entry, axis=1, value=visibility_lib.STRADDLES)
    if effective.get("schedule") == "gather":
        rows["picked"] = jax.lax.map(lambda one: plan.pick(*one), (plan.pad_tokens(selected, False), rows))
    elif selected is not None:
        selected = selection.capped(visibility, segments, selected)  # as gathering has K places
        rows["selected"] = plan.pad_entries(plan.pad_tokens(selected, False), axis=2, value=False)
    out = jax.lax.map(lambda one: _attend(plan, *one, inputs.sinks), (plan.pad_tokens(q, 0), keys, rows))
    return out[:, : q.shape[1]]


def cost(attend: Attend, sizes: Sizes, effective: Effective) -> tuple[Pass, Pass]:
    """See `attend.Backend`: all heads of a block of queries meet the keys together."""
    visibility, block_q, seq_len = attend.visibility, effective["block_q"], sizes.seq_len
    ends = np.arange(block_q, seq_len + block_q, block_q)
    keys = np.full(len(ends), block_q + min(visibility.window, seq_len) - 1)
    if effective.get("schedule") == "gather":
        keys = keys + min(visibility.top_k, visibility.num_entries(seq_len))
    elif "block_kv" in effective:
        entries = np.minimum(visibility.num_entries(ends), visibility.num_entries(seq_len))
        keys = keys + -(-entries // effective["block_kv"]) * effective["block_kv"]
    row = sizes.head_width * jnp.dtype(sizes.dtype).itemsize
    pairs, once = int(keys.sum()) * block_q, 2 * seq_len * row
    shared = int(keys.sum()) * row / sizes.heads
    return Pass(pairs, once + shared), Pass(pairs, 2 * once + 3 * shared)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes of the blocks; queries are padded to whole blocks, local keys also on the left by what a window reaches."""

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
        """Local keys before a block that its first query may see."""
        return min(self.visibility.window, self.seq_len) - 1

    @property
    def q_len(self) -> int:
        return round_up(self.seq_len, self.block_q)

    def pad_tokens(self, x: Shaped[Array, "B S *rest"], value: float) -> Shaped[Array, "B q_len *rest"]:
        """To whole blocks of queries."""
        return pad(x, 1, 0, self.q_len - self.seq_len, value)

    def pad_local(self, x: Shaped[Array, "B S *rest"], value: float = 0) -> Shaped[Array, "B padded *rest"]:
        """On the left by what the first query reaches, on the right as `pad_tokens`."""
        return pad(x, 1, self.reach, self.q_len - self.seq_len, value)

    def pad_entries(self, x: Shaped[Array, "..."], axis: int, value: float = 0) -> Shaped[Array, "..."]:
        """C to whole blocks of entries along `axis`."""
        return pad(x, axis, 0, round_up(self.entries, self.block_kv) - self.entries, value)

    def num_steps(self, block: Int32[Array, ""]) -> Int32[Array, ""]:
        """Blocks of entries that the queries of a block may see."""
        complete = self.visibility.num_entries((block + 1) * self.block_q)
        return jnp.minimum(-(-complete // self.block_kv), -(-self.entries // self.block_kv))

    def local_mask(self, block: Int32[Array, ""], rows: Rows) -> Bool[Array, "block_q 1 reached"]:
        """Which local keys a block of queries sees, of those that it may."""
        start = block * self.block_q
        t = start + jnp.arange(self.block_q)[:, None]
        j = start - self.reach + jnp.arange(self.reach + self.block_q)[None]
        queries = _slice(rows["segments"], start, self.block_q)[:, None]
        keys = _slice(rows["local_segments"], start, self.reach + self.block_q)[None]
        return self.visibility.local_mask(t, j, queries, keys)[:, None]

    def entry_mask(
        self, block: Int32[Array, ""], step: Int32[Array, ""] | int, rows: Rows
    ) -> Bool[Array, "block_q 1 block_kv"]:
        """Which entries of a block of them a block of queries sees."""
        start, first = block * self.block_q, step * self.block_kv
        t = start + jnp.arange(self.block_q)[:, None]
        c = first + jnp.arange(self.block_kv)[None]
        queries = _slice(rows["segments"], start, self.block_q)[:, None]
        entries = _slice(rows["entry_segments"], first, self.block_kv)[None]
        selected = None
        if "selected" in rows:
            selected = jax.lax.dynamic_slice(rows["selected"], (start, first), (self.block_q, self.block_kv))
        return self.visibility.entry_mask(t, c, queries, entries, selected)[:, None]

    def pick(self, selected: Bool[Array, "q_len C"], rows: Rows) -> Int32[Array, "q_len places"]:
        """The entries that each query sees, in order, then `entries` where there are no more."""
        places = min(self.visibility.top_k, self.entries)
        all_at_once = dataclasses.replace(self, block_kv=self.entries)

        def pick_in_block(block: Int32[Array, ""]) -> Int32[Array, "block_q places"]:
            chosen = _slice(selected, block * self.block_q, self.block_q)
            return selection.indices(all_at_once.entry_mask(block, 0, rows)[:, 0] & chosen, places)

        return jax.lax.map(pick_in_block, jnp.arange(self.q_len // self.block_q)).reshape(-1, places)

    def gather(
        self, block: Int32[Array, ""], keys: Arrays, rows: Rows
    ) -> tuple[Int32[Array, "block_q places"], Float[Array, "block_q places D"], Bool[Array, "block_q 1 places"]]:
        """The picked indices of a block of queries, the entries there, and which of them exist."""
        picked = _slice(rows["picked"], block * self.block_q, self.block_q)
        entries = keys["entries"].at[picked].get(mode="fill", fill_value=0)
        return picked, entries, (picked < self.entries)[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: _Plan, q: Float[Array, "q_len H D"], keys: Arrays, rows: Rows, sinks: Float32[Array, " H"] | None
) -> Float[Array, "q_len H D"]:
    """One sequence."""
    return _forward(plan, q, keys, rows, sinks)[0]


def _forward(
    plan: _Plan, q: Float[Array, "q_len H D"], keys: Arrays, rows: Rows, sinks: Float32[Array, " H"] | None
) -> tuple[Float[Array, "q_len H D"], Float32[Array, "q_len H"]]:
    """Output and log-sum-exp."""
    width = q.shape[-1]

    def one_block(_: None, xs: tuple) -> tuple[None, tuple[Array, Array]]:
        block, q_block = xs
        peak = jnp.full((plan.block_q, plan.heads, 1), _LOWEST_PEAK)
        total = jnp.zeros_like(peak)
        if sinks is not None:
            sink = sinks[None, :, None]  # not the peak itself: one of -inf would make masked keys the highest
            peak = jnp.maximum(peak, sink)
            total = jnp.exp(sink - peak)
        state = (peak, total, jnp.zeros((plan.block_q, plan.heads, width)))
        local = _slice(keys["local"], block * plan.block_q, plan.reach + plan.block_q)
        state = _fold(state, q_block, local, plan.local_mask(block, rows))
        if "picked" in rows:
            _, entries, mask = plan.gather(block, keys, rows)
            state = _fold(state, q_block, entries, mask)
        elif plan.entries:

            def step_over(step: Int32[Array, ""], state: State) -> State:
                entries = _slice(keys["entries"], step * plan.block_kv, plan.block_kv)
                return _fold(state, q_block, entries, plan.entry_mask(block, step, rows))

            state = jax.lax.fori_loop(0, plan.num_steps(block), step_over, state)
        peak, total, out = state
        total = jnp.where(total == 0.0, 1.0, total)
        return None, ((out / total).astype(q.dtype), (peak + jnp.log(total))[..., 0])

    blocks = q.shape[0] // plan.block_q
    _, (out, logsumexp) = jax.lax.scan(one_block, None, (jnp.arange(blocks), _blocked(q, plan.block_q)))
    return out.reshape(q.shape), logsumexp.reshape(q.shape[:-1])


def _fold(state: State, q: Float[Array, "block_q H D"], keys: SomeKeys, mask: Bool[Array, "block_q 1 n"]) -> State:
    """Adds some keys to the running softmax."""
    peak, total, out = state
    axes = "kd" if keys.ndim == 2 else "qkd"
    logits = jnp.where(mask, _dot(f"qhd,{axes}->qhk", q, keys) * _scale(keys), MASK_VALUE)
    new_peak = jnp.maximum(peak, logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - new_peak)
    decay = jnp.exp(peak - new_peak)
    total = total * decay + weights.sum(axis=-1, keepdims=True)
    return new_peak, total, out * decay + _dot(f"qhk,{axes}->qhd", weights.astype(keys.dtype), keys)


def _attend_forward(
    plan: _Plan, q: Float[Array, "q_len H D"], keys: Arrays, rows: Rows, sinks: Float32[Array, " H"] | None
) -> tuple[Float[Array, "q_len H D"], tuple]:
    out, logsumexp = attend_lib.saved(*_forward(plan, q, keys, rows, sinks))
    return out, (q, keys, rows, sinks, out, logsumexp)


def _attend_backward(
    plan: _Plan, residuals: tuple, d_out: Float[Array, "q_len H D"]
) -> tuple[Float[Array, "q_len H D"], Arrays, None, Float32[Array, " H"] | None]:
    q, keys, rows, sinks, out, logsumexp = residuals
    mean = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)

    def one_block(d_keys: Arrays, xs: tuple) -> tuple[Arrays, Float[Array, "block_q H D"]]:
        block, q_block, d_out_block, logsumexp_block, mean_block = xs
        block_args = (q_block, d_out_block, logsumexp_block[..., None], mean_block[..., None])
        span = plan.reach + plan.block_q
        local = _slice(keys["local"], block * plan.block_q, span)
        d_q, d_local = _gradients(*block_args, local, plan.local_mask(block, rows))
        d_keys["local"] = _add_slice(d_keys["local"], d_local, block * plan.block_q)
        if "picked" in rows:
            picked, entries, mask = plan.gather(block, keys, rows)
            more, d_entries = _gradients(*block_args, entries, mask)
            d_q += more
            d_keys["entries"] = d_keys["entries"].at[picked].add(d_entries, mode="drop")
        elif plan.entries:

            def step_over(step: Int32[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
                d_q, d_entries = carry
                entries = _slice(keys["entries"], step * plan.block_kv, plan.block_kv)
                more, d_block = _gradients(*block_args, entries, plan.entry_mask(block, step, rows))
                return d_q + more, _add_slice(d_entries, d_block, step * plan.block_kv)

            steps = plan.num_steps(block)
            d_q, d_keys["entries"] = jax.lax.fori_loop(0, steps, step_over, (d_q, d_keys["entries"]))
        return d_keys, d_q.astype(q.dtype)

    blocked = [_blocked(x, plan.block_q) for x in (q, d_out, logsumexp, mean)]
    d_keys = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), keys)
    d_keys, d_q = jax.lax.scan(one_block, d_keys, (jnp.arange(len(blocked[0])), *blocked))
    d_keys = jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), d_keys, keys)
    d_sinks = None if sinks is None else -jnp.sum(jnp.exp(sinks[None] - logsumexp) * mean, axis=0)
    return d_q.reshape(q.shape), d_keys, None, d_sinks


_attend.defvjp(_attend_forward, _attend_backward)


def _gradients(
    q: Float[Array, "block_q H D"],
    d_out: Float[Array, "block_q H D"],
    logsumexp: Float32[Array, "block_q H 1"],
    mean: Float32[Array, "block_q H 1"],
    keys: SomeKeys,
    mask: Bool[Array, "block_q 1 n"],
) -> tuple[Float32[Array, "block_q H D"], Float32[Array, "..."]]:
    """Gradients of a block of queries and of keys, which serve as values too; `mean` is that of out times d_out."""
    axes = "kd" if keys.ndim == 2 else "qkd"
    logits = jnp.where(mask, _dot(f"qhd,{axes}->qhk", q, keys) * _scale(keys), MASK_VALUE)
    weights = jnp.exp(logits - logsumexp)
    d_logits = weights * (_dot(f"qhd,{axes}->qhk", d_out, keys) - mean) * _scale(keys)
    weights, d_logits = weights.astype(keys.dtype), d_logits.astype(keys.dtype)
    d_keys = _dot(f"qhk,qhd->{axes}", weights, d_out) + _dot(f"qhk,qhd->{axes}", d_logits, q)
    return _dot(f"qhk,{axes}->qhd", d_logits, keys), d_keys


_dot = functools.partial(product, out_dtype=jnp.float32)


def _scale(keys: SomeKeys) -> float:
    """1 / sqrt(D), of logits that are float32; q times it would be rounded to q's dtype."""
    return keys.shape[-1] ** -0.5


def _blocked(x: Shaped[Array, " length *rest"], size: int) -> Shaped[Array, "blocks size *rest"]:
    return x.reshape(-1, size, *x.shape[1:])


def _slice(x: Shaped[Array, " length *rest"], start: Array | int, size: int) -> Shaped[Array, " size *rest"]:
    return jax.lax.dynamic_slice_in_dim(x, start, size)


def _add_slice(
    x: Float32[Array, " length *rest"], update: Float32[Array, " size *rest"], start: Array | int
) -> Float32[Array, " length *rest"]:
    return jax.lax.dynamic_update_slice_in_dim(x, _slice(x, start, len(update)) + update, start, axis=0)
