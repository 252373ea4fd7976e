"""Dense float32 attention: the oracle that every other backend is held against. Memory grows with S * (S + C)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from research.attention import visibility as visibility_lib
from research.attention.attend import Attend, Documents, Effective, Inputs, Pass, Sizes
from research.attention.indexer import selection
from research.attention.product import precision_name, product
from research.attention.visibility import Visibility

# Finite, and within float32: infinities would hide behind 0 * inf in a gradient.
MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)
_FLOAT32 = 4  # bytes


def resolve(attend: Attend, sizes: Sizes) -> Effective:
    """See `attend.Backend`. No option has an effect here."""
    del sizes
    attend.refuse_unread()
    return {"accumulation_dtype": "float32", "precision": precision_name(jnp.float32)}


def prepare(attend: Attend, documents: Documents) -> None:
    """See `attend.Backend`. Nothing here is worth sharing."""
    del attend, documents


def compute(attend: Attend, effective: Effective, inputs: Inputs) -> Float[Array, "B S H D"]:
    """See `attend.Backend`."""
    del effective
    q, sinks = inputs.q, inputs.sinks
    keys_BxTxD = jnp.concatenate(inputs.keys, axis=1).astype(jnp.float32)
    mask_BxSxT = dense_mask(attend.visibility, inputs.documents.segments, inputs.selected)[:, None]
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


def cost(attend: Attend, sizes: Sizes, effective: Effective) -> tuple[Pass, Pass]:
    """See `attend.Backend`: logits are written and read."""
    del effective
    pairs = sizes.seq_len * (sizes.seq_len + attend.visibility.num_entries(sizes.seq_len))
    logits = 2 * _FLOAT32 * pairs
    return Pass(pairs, 2 * logits), Pass(pairs, 4 * logits)


def dense_mask(
    visibility: Visibility, segments: Int32[Array, "B S"], selected: Bool[Array, "B S C"] | None = None
) -> Bool[Array, "B S T"]:
    """The visibility, the documents and the indexer's choice as one array, over `T = S + C` keys."""
    t = jnp.arange(segments.shape[1])
    queries = segments[:, :, None]
    mask = visibility.local_mask(t[None, :, None], t[None, None], queries, segments[:, None])
    if entries := visibility.num_entries(len(t)):
        c, of_entry = jnp.arange(entries)[None, None], visibility_lib.entry_segments(segments, visibility.ratio)
        sees = visibility.entry_mask(t[None, :, None], c, queries, of_entry[:, None], selected)
        if visibility.selects:
            sees = selection.at_most(sees, visibility.top_k)
        mask = jnp.concatenate([mask, sees], axis=-1)
    return mask
