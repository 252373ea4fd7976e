"""A part in plain XLA: wide products over many queries at once, a block of keys at a time (Dao et al. 2022).

No kernel of its own and no private API; for GPUs that have no kernel that fits, and for every other platform.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

from research.attention.backends.dot_product import MASK_VALUE
from research.attention.backends.joined.parts import NOTHING, Gradients, Joint, Part, Ranges, Softmax
from research.attention.padding import pad
from research.attention.product import product

# Bytes of the float32 logits of a step: more queries at once are fewer, larger products.
LOGITS_BYTES = 64 * 2**20

_dot = functools.partial(product, out_dtype=jnp.float32)


def forward(part: Part, block_kv: int) -> Softmax:
    """Attends to `block_kv` keys at a time."""
    return Softmax(*_by_queries(functools.partial(_forward, block_kv=block_kv), block_kv, part))


def backward(part: Part, joint: Joint, block_kv: int) -> Gradients:
    """The gradients, `block_kv` keys at a time."""
    return Gradients(*_by_queries(functools.partial(_backward, block_kv=block_kv), block_kv, part, joint))


def _forward(part: Part, *, block_kv: int) -> Softmax:
    shape = (*part.q.shape[:3], 1)
    initial = jnp.full(shape, NOTHING), jnp.zeros(shape), jnp.zeros(part.q.shape, jnp.float32)

    def accumulate(softmax: tuple, block: tuple[Shaped[Array, "sequences N D"], Any]) -> tuple[tuple, None]:
        row_max, row_sum, out = softmax
        keys, seen = block
        logits = jnp.where(seen[:, :, None], _dot("nthd,nkd->nthk", part.q, keys) * _scale(keys), MASK_VALUE)
        new_max = jnp.maximum(row_max, logits.max(axis=-1, keepdims=True))
        weights, rescale = jnp.exp(logits - new_max), jnp.exp(row_max - new_max)
        out = out * rescale + _dot("nthk,nkd->nthd", weights.astype(keys.dtype), keys)
        return (new_max, row_sum * rescale + weights.sum(axis=-1, keepdims=True), out), None

    (row_max, row_sum, out), _ = _over_keys(accumulate, initial, part, block_kv)
    seen = row_sum > 0
    out = out / jnp.where(seen, row_sum, 1.0)
    logsumexp = jnp.where(seen, row_max + jnp.log(jnp.where(seen, row_sum, 1.0)), NOTHING)
    return Softmax(out, logsumexp[..., 0])


def _backward(part: Part, joint: Joint, *, block_kv: int) -> Gradients:
    out, logsumexp, d_out = joint
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(axis=-1, keepdims=True)

    def differentiate(d_q: Float32[Array, "sequences q_len H D"], block: tuple) -> tuple[Array, Array]:
        keys, seen = block
        logits = jnp.where(seen[:, :, None], _dot("nthd,nkd->nthk", part.q, keys) * _scale(keys), MASK_VALUE)
        weights = jnp.exp(logits - logsumexp[..., None])
        d_logits = weights * (_dot("nthd,nkd->nthk", d_out, keys) - delta) * _scale(keys)
        weights, d_logits = weights.astype(keys.dtype), d_logits.astype(keys.dtype)
        d_keys = _dot("nthk,nthd->nkd", weights, d_out) + _dot("nthk,nthd->nkd", d_logits, part.q)
        return d_q + _dot("nthk,nkd->nthd", d_logits, keys), d_keys

    d_q, d_keys = _over_keys(differentiate, jnp.zeros(part.q.shape, jnp.float32), part, block_kv)
    d_keys = jnp.moveaxis(d_keys, 0, 1).reshape(len(d_keys[0]), -1, d_keys.shape[-1])
    return Gradients(d_q, d_keys[:, : part.keys.shape[1]])


def _over_keys(step: Callable, carry: Any, part: Part, block_kv: int) -> tuple[Any, Any]:
    """`jax.lax.scan` of `step(carry, (keys, seen))` over blocks of keys."""
    num_keys = part.keys.shape[1]
    blocks = -(-num_keys // block_kv)
    keys = jnp.moveaxis(_split(pad(part.keys, 1, 0, blocks * block_kv - num_keys, 0), 1, block_kv), 1, 0)
    firsts = block_kv * jnp.arange(blocks, dtype=jnp.int32)
    if isinstance(part.seen, Ranges):
        seen = None
    else:
        padded = pad(part.seen, 2, 0, blocks * block_kv - num_keys, False)
        seen = jnp.moveaxis(_split(padded, 2, block_kv), 2, 0)

    def of_block(carry: Any, block: tuple) -> tuple[Any, Any]:
        first, keys, seen = block
        if seen is None:
            key = first + jnp.arange(block_kv, dtype=jnp.int32)[None, None]
            seen = (key >= part.seen.first[..., None]) & (key < part.seen.end[..., None])
        return step(carry, (keys, seen))

    if blocks == 1:
        carry, found = of_block(carry, (firsts[0], keys[0], None if seen is None else seen[0]))
        return carry, None if found is None else found[None]
    return jax.lax.scan(of_block, carry, (firsts, keys, seen))


def _by_queries(compute: Callable, block_kv: int, part: Part, *others: Any) -> tuple[Array, Array]:
    """`compute(part, *others)` for as many queries at once as `LOGITS_BYTES` allow.

    Returns:
      What `compute` does: the first result joined along the queries; the second too, or, of keys, their sum.
    """
    n, t, heads, _ = part.q.shape
    rows = max(LOGITS_BYTES // (4 * heads * block_kv), 1)
    by_query = (part.q, part.seen, *others)
    if n * t <= rows:
        return compute(part, *others)
    if t <= rows:  # some of the sequences at a time
        at_once = max(size for size in range(1, n + 1) if n % size == 0 and size * t <= rows)

        def sequences(xs: tuple) -> tuple[Array, Array]:
            keys, (q, seen, *others) = xs
            return compute(Part(q, keys, seen), *others)

        split = jax.tree.map(lambda x: x.reshape(-1, at_once, *x.shape[1:]), (part.keys, by_query))
        found = jax.lax.map(sequences, split)
        return tuple(x.reshape(-1, *x.shape[2:]) for x in found)
    # Some of the queries of all sequences at a time.
    at_once = max(rows // n, 1)
    blocks = -(-t // at_once)
    padded = jax.tree.map(lambda x: pad(x, 1, 0, blocks * at_once - t, 0), by_query)
    split = jax.tree.map(lambda x: jnp.moveaxis(_split(x, 1, at_once), 1, 0), padded)

    def queries(d_keys: Array | None, xs: tuple) -> tuple[Array | None, Any]:
        q, seen, *others = xs
        first, second = compute(Part(q, part.keys, seen), *others)
        return (None, (first, second)) if d_keys is None else (d_keys + second, first)

    def joined(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        return jnp.moveaxis(x, 0, 1).reshape(n, blocks * at_once, *x.shape[3:])[:, :t]

    if not others:
        _, (out, logsumexp) = jax.lax.scan(queries, None, split)
        return joined(out), joined(logsumexp)
    d_keys, d_q = jax.lax.scan(queries, jnp.zeros(part.keys.shape, jnp.float32), split)
    return joined(d_q), d_keys


def _split(x: Shaped[Array, "..."], axis: int, size: int) -> Shaped[Array, "..."]:
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def _scale(keys: Float[Array, "sequences N D"]) -> float:
    """1 / sqrt(D), of the float32 logits: q would be rounded to its dtype."""
    return keys.shape[-1] ** -0.5
