"""Which entries a CSA query may select and which it does, as booleans [S, C] or as indices [S, K]."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, Int32, Shaped, UInt32

from research.attention import visibility as visibility_lib
from research.attention.visibility import CompressedSparse, HeavilyCompressed

_BLOCK_Q = 128  # queries at a time, where an array over all of them and all entries is to be avoided
_GROUP = 128  # entries that are counted together


def visible_entries(visibility: HeavilyCompressed, segments: Int32[Array, "B S"]) -> Bool[Array, "B S C"]:
    """The entries that a query may select."""
    entry_segments = visibility_lib.entry_segments(segments, visibility.ratio)
    return visible_to(visibility, jnp.arange(segments.shape[-1]), segments, entry_segments)


def visible_to(
    visibility: HeavilyCompressed,
    t: Int[Array, " Q"],
    segments: Int32[Array, "B Q"],
    entry_segments: Int32[Array, "B C"],
) -> Bool[Array, "B Q C"]:
    """As `visible_entries` for some of the queries.

    Args:
      visibility: who sees whom before the selection.
      t: their tokens.
      segments: their documents.
      entry_segments: the documents of all entries, `visibility.entry_segments` of the whole sequence.
    """
    c = jnp.arange(entry_segments.shape[-1])
    return visibility.entry_mask(t[None, :, None], c[None, None], segments[:, :, None], entry_segments[:, None])


def membership(
    scores: Float32[Array, "*rows C"], visible: Bool[Array, "*rows C"], top_k: int
) -> Bool[Array, "*rows C"]:
    """Which entries `jax.lax.top_k` picks among the visible ones, without an array of [S, K, C].

    Args:
      scores: of a row's entries.
      visible: among which is picked.
      top_k: entries to pick, positive; where fewer are visible, all are picked.

    Returns:
      `min(top_k, visible entries)` True in each row. At ties the lower index wins; +0 ranks
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


def capped(
    visibility: CompressedSparse, segments: Int32[Array, "B S"], selected: Bool[Array, "B S C"]
) -> Bool[Array, "B S C"]:
    """Of each query's selected entries, where it sees more than `top_k` of them, the first `top_k` by index.

    `membership` never gives more. A selection that does would mean one thing where entries are gathered, K of them, and
    another where they are masked. Costs a pass over the booleans, which are made for a block of queries at a time.

    Args:
      visibility: who sees whom before the selection, and how many are selected.
      segments: the documents of the queries.
      selected: what the indexer chose.
    """
    _, seq_len, entries = selected.shape
    if entries <= visibility.top_k:
        return selected
    entry_segments = visibility_lib.entry_segments(segments, visibility.ratio)
    t, blocks = query_blocks((segments, selected), (visibility_lib.PADDING, False))

    def end_in_block(block: tuple) -> Int32[Array, "B Q 1"]:
        t, (segments, selected) = block
        return _end_of_first(selected & visible_to(visibility, t, segments, entry_segments), visibility.top_k)

    end = joined(jax.lax.map(end_in_block, (t, blocks)), seq_len)
    return selected & (jnp.arange(entries)[None, None] < end)


def at_most(selected: Bool[Array, "*rows C"], most: int) -> Bool[Array, "*rows C"]:
    """Of each row's True entries the first `most` by index."""
    entries = selected.shape[-1]
    if entries <= most:
        return selected
    index = jnp.arange(entries).reshape(*(1,) * (selected.ndim - 1), entries)
    return selected & (index < _end_of_first(selected, most))


def indices(selected: Bool[Array, "*rows C"], places: int) -> Int32[Array, "*rows K"]:
    """A membership as indices, for gathering: rising, then C where there are no more.

    Args:
      selected: of more than `places` True in a row the first are taken.
      places: K.
    """
    entries = selected.shape[-1]
    rows = selected.reshape(math.prod(selected.shape[:-1]), entries)
    place = jnp.where(rows, jnp.cumsum(rows, axis=-1, dtype=jnp.int32) - 1, places)
    nowhere = jnp.full((len(rows), places), entries, jnp.int32)
    entry = jnp.broadcast_to(jnp.arange(entries, dtype=jnp.int32), rows.shape)
    filled = nowhere.at[jnp.arange(len(rows))[:, None], place].set(entry, mode="drop")
    return filled.reshape(*selected.shape[:-1], places)


def query_blocks(tree: Any, padding: Any) -> tuple[Int[Array, "blocks Q"], Any]:
    """Cuts queries into blocks, to be scanned over.

    Args:
      tree: arrays [B, S, ...].
      padding: what fills the last block, a number for each array of the tree.

    Returns:
      The tokens t, and the tree as [blocks, B, Q, ...]: `S <= blocks * Q`.
    """
    seq_len = jax.tree.leaves(tree)[0].shape[1]
    size = min(_BLOCK_Q, seq_len)
    blocks = -(-seq_len // size)

    def cut(x: Array, value: float) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[1] = (0, blocks * size - seq_len)
        padded = jnp.pad(x, widths, constant_values=value)
        return jnp.moveaxis(padded.reshape(len(x), blocks, size, *x.shape[2:]), 1, 0)

    return jnp.arange(blocks * size).reshape(blocks, size), jax.tree.map(cut, tree, padding)


def joined(blocks: Shaped[Array, "blocks B Q *rest"], seq_len: int) -> Shaped[Array, "B S *rest"]:
    """The reverse of cutting into blocks."""
    count, batch, size = blocks.shape[:3]
    return jnp.moveaxis(blocks, 0, 1).reshape(batch, count * size, *blocks.shape[3:])[:, :seq_len]


def _end_of_first(selected: Bool[Array, "*rows C"], most: int) -> Int32[Array, "*rows 1"]:
    """Where a row's first `most` True entries end, anywhere before the next one.

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


def _kth_largest(x: Int32[Array, "*rows C"], k: int) -> Int32[Array, "*rows 1"]:
    """The k-th largest along the last axis, bit by bit from the top (a sort is slower, see LOG.md)."""
    flip = jnp.uint32(1 << 31)  # unsigned integers in the order of the signed ones
    keys = jax.lax.bitcast_convert_type(x, jnp.uint32) ^ flip

    def add_bit(step: Array, found: UInt32[Array, "*rows 1"]) -> UInt32[Array, "*rows 1"]:
        candidate = found | (flip >> step.astype(jnp.uint32))
        enough = jnp.sum(keys >= candidate, axis=-1, keepdims=True) >= k
        return jnp.where(enough, candidate, found)

    found = jax.lax.fori_loop(0, 32, add_bit, jnp.zeros((*x.shape[:-1], 1), jnp.uint32))
    return jax.lax.bitcast_convert_type(found ^ flip, jnp.int32)


def _total_order(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Integers that compare as `jax.lax.top_k` orders float32: -0 below +0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
