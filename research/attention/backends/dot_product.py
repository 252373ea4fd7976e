"""Dense float32 attention: the oracle that every other backend is held against. Memory grows with S * (S + C)."""

import jax
import jax.numpy as jnp

from research.attention import backends
from research.attention import visibility as visibility_lib
from research.attention.indexer import selection
from research.attention.product import precision_name, product

# Finite, and within float32: infinities would hide behind 0 * inf in a gradient.
MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)


def resolve(visibility, seq_len, heads, head_width, dtype, options, packed=True, target=None) -> backends.Effective:
    """See `backends.Backend.resolve`. No option has an effect here."""
    del visibility, seq_len, heads, head_width, dtype, packed, target
    backends.refuse_options("dot_product", options)
    return {"accumulation_dtype": "float32", "precision": precision_name(jnp.float32)}


def prepare(visibility, seq_len, segments, options) -> None:
    """See `backends.Backend.prepare`. Nothing here is worth sharing."""
    del visibility, seq_len, segments, options


def attend(
    q,
    local,
    compressed,
    *,
    visibility,
    sinks=None,
    segments=None,
    selected=None,
    options=backends.DEFAULT,
    prepared=None,
    target=None,
):
    """See `backends.Backend.attend`."""
    del prepared, target
    backends.check_arguments(
        q, local, compressed, visibility=visibility, sinks=sinks, segments=segments, selected=selected
    )
    backends.refuse_options("dot_product", options)
    keys_BxTxD = jnp.concatenate([local, compressed], axis=1).astype(jnp.float32)
    mask_BxSxT = dense_mask(visibility, q.shape[1], segments, selected)[:, None]
    logits = product("bshd,btd->bhst", q.astype(jnp.float32), keys_BxTxD)
    logits = jnp.where(mask_BxSxT, logits * q.shape[-1] ** -0.5, MASK_VALUE)

    peak = logits.max(axis=-1, keepdims=True)
    if sinks is not None:
        peak = jnp.maximum(peak, sinks[None, :, None, None])
    peak = jax.lax.stop_gradient(peak)
    weights = jnp.where(mask_BxSxT, jnp.exp(logits - peak), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks[None, :, None, None] - peak)
    weights = weights / jnp.where(total == 0.0, 1.0, total)
    return product("bhst,btd->bshd", weights, keys_BxTxD).astype(q.dtype)


def dense_mask(visibility, seq_len: int, segments=None, selected=None) -> jax.Array:
    """Bool [B or 1, S, S + C]: the visibility, the documents and the indexer's choice as one array."""
    t, packed = jnp.arange(seq_len), segments is not None
    of_query, of_key = (segments[:, :, None], segments[:, None]) if packed else (None, None)
    parts = [visibility.local_mask(t[None, :, None], t[None, None], of_query, of_key)]
    if entries := visibility.num_entries(seq_len):
        of_entry = visibility_lib.entry_segments(segments, visibility.ratio)[:, None] if packed else None
        c = jnp.arange(entries)[None, None]
        sees = visibility.entry_mask(t[None, :, None], c, of_query, of_entry, selected)
        parts.append(selection.at_most(sees, visibility.top_k) if visibility.selects else sees)
    batch = max(part.shape[0] for part in parts)
    return jnp.concatenate([jnp.broadcast_to(part, (batch, *part.shape[1:])) for part in parts], axis=-1)
