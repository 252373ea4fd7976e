"""Dense float32 attention, the reference for the other backends. Takes memory in proportion to S * (S + C)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from research.attention import visibility as visibility_lib
from research.attention.attend import Attend, Documents, Effective, Inputs, Pass, Sizes
from research.attention.indexer import selection
from research.attention.product import precision_name, product
from research.attention.visibility import Visibility

# Finite: an infinity would become NaN in a gradient, as 0 * inf.
MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)
_FLOAT32 = 4  # bytes


def resolve(attend: Attend, sizes: Sizes) -> Effective:
    """See `attend.Backend`. No option has an effect."""
    del sizes
    attend.refuse_unread()
    return {"accumulation_dtype": "float32", "precision": precision_name(jnp.float32)}


def prepare(attend: Attend, documents: Documents) -> None:
    """See `attend.Backend`. Calls share nothing."""
    del attend, documents


def compute(attend: Attend, effective: Effective, inputs: Inputs) -> Float[Array, "B S H D"]:
    """See `attend.Backend`."""
    del effective
    q, sinks = inputs.q, inputs.sinks
    keys = jnp.concatenate(inputs.keys, axis=1).astype(jnp.float32)
    mask = dense_mask(attend.visibility, inputs.documents.segments, inputs.selected)[:, None]
    logits = product("bshd,btd->bhst", q.astype(jnp.float32), keys)
    logits = jnp.where(mask, logits * q.shape[-1] ** -0.5, MASK_VALUE)

    row_max = logits.max(axis=-1, keepdims=True)
    if sinks is not None:
        row_max = jnp.maximum(row_max, sinks[None, :, None, None])
    row_max = jax.lax.stop_gradient(row_max)
    weights = jnp.where(mask, jnp.exp(logits - row_max), 0.0)
    row_sum = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        row_sum += jnp.exp(sinks[None, :, None, None] - row_max)
    weights = weights / jnp.where(row_sum == 0.0, 1.0, row_sum)
    return product("bhst,btd->bshd", weights, keys).astype(q.dtype)


def cost(attend: Attend, sizes: Sizes, effective: Effective) -> tuple[Pass, Pass]:
    """See `attend.Backend`. Counts the logits, which are written to memory and read again."""
    del effective
    pairs = sizes.seq_len * (sizes.seq_len + attend.visibility.num_entries(sizes.seq_len))
    logits = 2 * _FLOAT32 * pairs
    return Pass(pairs, 2 * logits), Pass(pairs, 4 * logits)


def dense_mask(
    visibility: Visibility, segments: Int32[Array, "B S"], selected: Bool[Array, "B S C"] | None = None
) -> Bool[Array, "B S T"]:
    """The mask over `T = S + C` keys: local ones, then entries."""
    t = jnp.arange(segments.shape[1])
    queries = segments[:, :, None]
    mask = visibility.local_mask(t[None, :, None], t[None, None], queries, segments[:, None])
    if entries := visibility.num_entries(len(t)):
        c, entry_segments = jnp.arange(entries)[None, None], visibility_lib.entry_segments(segments, visibility.ratio)
        entry_mask = visibility.entry_mask(t[None, :, None], c, queries, entry_segments[:, None], selected)
        if visibility.selects:
            entry_mask = selection.at_most(entry_mask, visibility.top_k)
        mask = jnp.concatenate([mask, entry_mask], axis=-1)
    return mask
