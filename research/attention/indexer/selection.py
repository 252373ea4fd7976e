"""The selection of entries by CSA's queries, as booleans [S, C] or as indices [S, K]."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, Int32, Shaped, UInt32

from research.attention import visibility as visibility_lib
from research.attention.visibility import CompressedSparse, HeavilyCompressed

_BLOCK_Q = 128  # queries of a block, where no array over all queries and entries may exist
_GROUP = 128  # entries whose selected ones are counted together


def visible_entries(visibility: HeavilyCompressed, segments: Int32[Array, "B S"]) -> Bool[Array, "B S C"]:
    """The entries that each query sees before the selection."""
    entry_segments = visibility_lib.entry_segments(segments, visibility.ratio)
    return visible_to(visibility, jnp.arange(segments.shape[-1]), segments, entry_segments)


def visible_to(
    visibility: HeavilyCompressed,
    t: Int[Array, " Q"],
    segments: Int32[Array, "B Q"],
    entry_segments: Int32[Array, "B C"],
) -> Bool[Array, "B Q C"]:
    """As `visible_entries`, for some of the queries.

    Args:
      visibility: which entries each query sees before the selection.
      t: tokens of the queries.
      segments: segments of the queries.
      entry_segments: segments of all entries, by `visibility.entry_segments`.
    """
    c = jnp.arange(entry_segments.shape[-1])
    return visibility.entry_mask(t[None, :, None], c[None, None], segments[:, :, None], entry_segments[:, None])


def membership(
    scores: Float32[Array, "*rows C"], visible: Bool[Array, "*rows C"], top_k: int
) -> Bool[Array, "*rows C"]:
    """The entries that `jax.lax.top_k` selects among the visible ones, as booleans.

    No array [S, K, C] exists, as it would with one-hot indices.

    Args:
      scores: scores of the entries.
      visible: the entries that may be selected.
      top_k: number of entries to select, positive. If fewer are visible, all of them are selected.

    Returns:
      `min(top_k, visible entries)` True per row. As in `jax.lax.top_k`, the lower index wins a tie, and +0 is greater
      than -0.
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
    """The selected entries, for a query that sees more than `top_k` of them only the first `top_k` by index.

    `membership` never selects more. For other selections this makes backends agree: some gather at most K entries,
    others mask. Takes a pass over the booleans, for a block of queries at a time.

    Args:
      visibility: which entries each query sees before the selection, and `top_k`.
      segments: segments of the queries.
      selected: the entries that the indexer selected.
    """
    _, seq_len, entries = selected.shape
    if entries <= visibility.top_k:
        return selected
    entry_segments = visibility_lib.entry_segments(segments, visibility.ratio)
    t, blocks = query_blocks((segments, selected), (visibility_lib.PADDING, False))

    def end_in_block(
        block: tuple[Int32[Array, " Q"], tuple[Int32[Array, "B Q"], Bool[Array, "B Q C"]]],
    ) -> Int32[Array, "B Q 1"]:
        t, (segments, selected) = block
        return _capped_end(selected & visible_to(visibility, t, segments, entry_segments), visibility.top_k)

    end = joined(jax.lax.map(end_in_block, (t, blocks)), seq_len)
    return selected & (jnp.arange(entries)[None, None] < end)


def at_most(selected: Bool[Array, "*rows C"], most: int) -> Bool[Array, "*rows C"]:
    """The first `most` True entries of each row, by index."""
    entries = selected.shape[-1]
    if entries <= most:
        return selected
    index = jnp.arange(entries).reshape(*(1,) * (selected.ndim - 1), entries)
    return selected & (index < _capped_end(selected, most))


def indices(selected: Bool[Array, "*rows C"], size: int) -> Int32[Array, "*rows K"]:
    """The indices of the True entries of each row, ascending; C after the last one.

    Args:
      selected: if a row has more than `size` True entries, the first ones are taken.
      size: K.
    """
    entries = selected.shape[-1]
    rows = selected.reshape(math.prod(selected.shape[:-1]), entries)
    position = jnp.where(rows, jnp.cumsum(rows, axis=-1, dtype=jnp.int32) - 1, size)
    initial = jnp.full((len(rows), size), entries, jnp.int32)
    entry = jnp.broadcast_to(jnp.arange(entries, dtype=jnp.int32), rows.shape)
    filled = initial.at[jnp.arange(len(rows))[:, None], position].set(entry, mode="drop")
    return filled.reshape(*selected.shape[:-1], size)


def query_blocks(tree: Any, padding: Any) -> tuple[Int[Array, "blocks Q"], Any]:
    """Splits arrays over queries into blocks, for a scan.

    Args:
      tree: arrays [B, S, ...].
      padding: a tree of numbers, with which the last block is padded.

    Returns:
      The tokens t of the queries, and the tree with arrays [blocks, B, Q, ...]; `S <= blocks * Q`.
    """
    seq_len = jax.tree.leaves(tree)[0].shape[1]
    size = min(_BLOCK_Q, seq_len)
    blocks = -(-seq_len // size)

    def split(x: Shaped[Array, "B S *rest"], value: float) -> Shaped[Array, "blocks B Q *rest"]:
        widths = [(0, 0)] * x.ndim
        widths[1] = (0, blocks * size - seq_len)
        padded = jnp.pad(x, widths, constant_values=value)
        return jnp.moveaxis(padded.reshape(len(x), blocks, size, *x.shape[2:]), 1, 0)

    return jnp.arange(blocks * size).reshape(blocks, size), jax.tree.map(split, tree, padding)


def joined(blocks: Shaped[Array, "blocks B Q *rest"], seq_len: int) -> Shaped[Array, "B S *rest"]:
    """The inverse of `query_blocks`, for one array."""
    count, batch, size = blocks.shape[:3]
    return jnp.moveaxis(blocks, 0, 1).reshape(batch, count * size, *blocks.shape[3:])[:, :seq_len]


def _capped_end(selected: Bool[Array, "*rows C"], most: int) -> Int32[Array, "*rows 1"]:
    """An index per row: after the first `most` True entries, and not after the next True entry.

    Counts groups of entries, then entries in one group: a cumulative sum over all entries takes longer (LOG.md).
    """
    entries = selected.shape[-1]
    widths = [(0, 0)] * (selected.ndim - 1) + [(0, -entries % _GROUP)]
    groups = jnp.pad(selected, widths).reshape(*selected.shape[:-1], -1, _GROUP)
    up_to = jnp.cumsum(groups.sum(axis=-1, dtype=jnp.int32), axis=-1)
    whole = jnp.sum(
        up_to <= most, axis=-1, keepdims=True, dtype=jnp.int32
    )  # groups in which the count stays within `most`
    room = most - jnp.max(jnp.where(up_to <= most, up_to, 0), axis=-1, keepdims=True)
    at = jnp.minimum(whole, groups.shape[-2] - 1)
    next_group = jnp.take_along_axis(groups, at[..., None], axis=-2)[..., 0, :]
    within = jnp.cumsum(next_group, axis=-1, dtype=jnp.int32) <= room
    return whole * _GROUP + jnp.sum(within, axis=-1, keepdims=True, dtype=jnp.int32)


def _kth_largest(x: Int32[Array, "*rows C"], k: int) -> Int32[Array, "*rows 1"]:
    """The k-th largest along the last axis, found bit by bit from the highest (a sort is slower, see LOG.md)."""
    flip = jnp.uint32(1 << 31)  # maps int32 to uint32 in the same order
    keys = jax.lax.bitcast_convert_type(x, jnp.uint32) ^ flip

    def add_bit(step: Int32[Array, ""], found: UInt32[Array, "*rows 1"]) -> UInt32[Array, "*rows 1"]:
        candidate = found | (flip >> step.astype(jnp.uint32))
        enough = jnp.sum(keys >= candidate, axis=-1, keepdims=True) >= k
        return jnp.where(enough, candidate, found)

    found = jax.lax.fori_loop(0, 32, add_bit, jnp.zeros((*x.shape[:-1], 1), jnp.uint32))
    return jax.lax.bitcast_convert_type(found ^ flip, jnp.int32)


def _total_order(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Maps float32 to integers in the order of `jax.lax.top_k`, in which -0 is less than +0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
