"""Which entries a CSA query may select and which it does, as booleans [S, C] or as indices [S, K]."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from research.attention import visibility as visibility_lib

_BLOCK_Q = 128  # queries at a time, where an array over all of them and all entries is to be avoided
_GROUP = 128  # entries that are counted together


def visible_entries(visibility: visibility_lib.HeavilyCompressed, segments: jax.Array) -> jax.Array:
    """Bool [B, S, C]: the entries that a query may select, `segments` being int32 [B, S]."""
    of_entry = visibility_lib.entry_segments(segments, visibility.ratio)
    return visible_to(visibility, jnp.arange(segments.shape[-1]), segments, of_entry)


def visible_to(
    visibility: visibility_lib.HeavilyCompressed, t: jax.Array, segments: jax.Array, of_entry: jax.Array
) -> jax.Array:
    """As `visible_entries` for some of the queries: bool [B, Q, C].

    Args:
      visibility: who sees whom before the selection.
      t: integer [Q], their tokens.
      segments: int32 [B, Q], their documents.
      of_entry: int32 [B, C], the documents of all entries, `visibility.entry_segments` of the whole sequence.
    """
    c = jnp.arange(of_entry.shape[-1])
    return visibility.entry_mask(t[None, :, None], c[None, None], segments[:, :, None], of_entry[:, None])


def membership(scores: jax.Array, visible: jax.Array, top_k: int) -> jax.Array:
    """Which entries `jax.lax.top_k` picks among the visible ones, without an array of [S, K, C].

    Args:
      scores: float32 [..., S, C].
      visible: bool [..., S, C].
      top_k: entries to pick, positive; where fewer are visible, all are picked.

    Returns:
      bool [..., S, C] with `min(top_k, visible entries)` True in each row. At ties the lower index wins; +0 ranks
      above -0, as in `jax.lax.top_k`.
    """
    if top_k >= scores.shape[-1]:
        return visible
    order = _total_order(jnp.where(visible, scores, -jnp.inf))
    kth = _kth_largest(order, top_k)
    above = visible & (order > kth)
    tied = visible & (order == kth)
    room = top_k - above.sum(axis=-1, keepdims=True)
    return above | (tied & (jnp.cumsum(tied, axis=-1) <= room))


def capped(visibility: visibility_lib.CompressedSparse, segments: jax.Array, selected: jax.Array) -> jax.Array:
    """Of each query's selected entries, where it sees more than `top_k` of them, the first `top_k` by index.

    `membership` never gives more. A selection that does would mean one thing where entries are gathered, K of them, and
    another where they are masked. Costs a pass over the booleans, which are made for a block of queries at a time.

    Args:
      visibility: who sees whom before the selection, and how many are selected.
      segments: int32 [B, S].
      selected: bool [B, S, C].

    Returns:
      bool [B, S, C].
    """
    _, seq_len, entries = selected.shape
    if entries <= visibility.top_k:
        return selected
    of_entry = visibility_lib.entry_segments(segments, visibility.ratio)
    t, blocks = query_blocks((segments, selected), (visibility_lib.PADDING, False))

    def of_block(block):
        t, (segments, selected) = block
        return _end_of_first(selected & visible_to(visibility, t, segments, of_entry), visibility.top_k)

    end = joined(jax.lax.map(of_block, (t, blocks)), seq_len)
    return selected & (jnp.arange(entries)[None, None] < end)


def at_most(selected: jax.Array, most: int) -> jax.Array:
    """bool [..., C]: of each row's True entries the first `most` by index."""
    entries = selected.shape[-1]
    if entries <= most:
        return selected
    index = jnp.arange(entries).reshape(*(1,) * (selected.ndim - 1), entries)
    return selected & (index < _end_of_first(selected, most))


def indices(selected: jax.Array, places: int) -> jax.Array:
    """A membership as indices, for gathering: rising, then C where there are no more.

    Args:
      selected: bool [..., C]; of more than `places` True in a row the first are taken.
      places: K.

    Returns:
      int32 [..., places].
    """
    entries = selected.shape[-1]
    rows = selected.reshape(math.prod(selected.shape[:-1]), entries)
    place = jnp.where(rows, jnp.cumsum(rows, axis=-1, dtype=jnp.int32) - 1, places)
    nowhere = jnp.full((len(rows), places), entries, jnp.int32)
    entry = jnp.broadcast_to(jnp.arange(entries, dtype=jnp.int32), rows.shape)
    filled = nowhere.at[jnp.arange(len(rows))[:, None], place].set(entry, mode="drop")
    return filled.reshape(*selected.shape[:-1], places)


def query_blocks(tree: Any, padding: Any) -> tuple[jax.Array, Any]:
    """Cuts queries into blocks, to be scanned over.

    Args:
      tree: arrays [B, S, ...].
      padding: what fills the last block, a number for each array of the tree.

    Returns:
      t, integer [blocks, Q], and the tree as [blocks, B, Q, ...]: `S <= blocks * Q`.
    """
    seq_len = jax.tree.leaves(tree)[0].shape[1]
    size = min(_BLOCK_Q, seq_len)
    blocks = -(-seq_len // size)

    def cut(x, value):
        widths = [(0, 0)] * x.ndim
        widths[1] = (0, blocks * size - seq_len)
        padded = jnp.pad(x, widths, constant_values=value)
        return jnp.moveaxis(padded.reshape(len(x), blocks, size, *x.shape[2:]), 1, 0)

    return jnp.arange(blocks * size).reshape(blocks, size), jax.tree.map(cut, tree, padding)


def joined(blocks: jax.Array, seq_len: int) -> jax.Array:
    """[blocks, B, Q, ...] back to [B, S, ...]."""
    count, batch, size = blocks.shape[:3]
    return jnp.moveaxis(blocks, 0, 1).reshape(batch, count * size, *blocks.shape[3:])[:, :seq_len]


def _end_of_first(selected: jax.Array, most: int) -> jax.Array:
    """int32 [..., 1]: where a row's first `most` True entries end, anywhere before the next one.

    By counts of groups of entries, and ranks within one group: a running sum over all entries takes longer (LOG.md).
    """
    entries = selected.shape[-1]
    widths = [(0, 0)] * (selected.ndim - 1) + [(0, -entries % _GROUP)]
    groups = jnp.pad(selected, widths).reshape(*selected.shape[:-1], -1, _GROUP)
    up_to = jnp.cumsum(groups.sum(axis=-1, dtype=jnp.int32), axis=-1)
    whole = jnp.sum(up_to <= most, axis=-1, keepdims=True, dtype=jnp.int32)  # groups without an entry too many
    room = most - jnp.max(jnp.where(up_to <= most, up_to, 0), axis=-1, keepdims=True)
    at = jnp.minimum(whole, groups.shape[-2] - 1)
    broken = jnp.take_along_axis(groups, at[..., None], axis=-2)[..., 0, :]
    within = jnp.cumsum(broken, axis=-1, dtype=jnp.int32) <= room
    return whole * _GROUP + jnp.sum(within, axis=-1, keepdims=True, dtype=jnp.int32)


def _kth_largest(x: jax.Array, k: int) -> jax.Array:
    """int32 [..., 1]: the k-th largest along the last axis, bit by bit from the top (a sort is slower, see LOG.md)."""
    flip = jnp.uint32(1 << 31)  # unsigned integers in the order of the signed ones
    keys = jax.lax.bitcast_convert_type(x, jnp.uint32) ^ flip

    def add_bit(step, found):
        candidate = found | (flip >> step.astype(jnp.uint32))
        enough = jnp.sum(keys >= candidate, axis=-1, keepdims=True) >= k
        return jnp.where(enough, candidate, found)

    found = jax.lax.fori_loop(0, 32, add_bit, jnp.zeros((*x.shape[:-1], 1), jnp.uint32))
    return jax.lax.bitcast_convert_type(found ^ flip, jnp.int32)


def _total_order(x: jax.Array) -> jax.Array:
    """int32 that compare as `jax.lax.top_k` orders float32: -0 below +0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
