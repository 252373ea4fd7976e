"""Block schedules in closed form, in NumPy, in time proportional to the number of active blocks.

A block of queries starts at row r, a block of keys at local token j or at entry c. For local keys and for entries, the
visible keys of a query are a band. So the active blocks follow from the ends of the blocks, and the mask of a partial
block from one offset: `r - j` for local keys, `r - c * ratio` for entries (a shift of rows and keys together does not
change `Layout.sees`). With CSA, all blocks with complete entries are active and partial; the selected entries mask them
at run time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Int, Int8, Int32

from research.attention.backends.splash.layout import Layout

EMPTY, PARTIAL, FULL = 0, 1, 2  # tokamax's numbering

# Of each block: indices of its queries and of its keys, 1 for entries and 0 for local keys, offset, whether it is full.
Blocks = tuple[
    Int[np.ndarray, " blocks"],
    Int[np.ndarray, " blocks"],
    Int[np.ndarray, " blocks"],
    Int[np.ndarray, " blocks"],
    Bool[np.ndarray, " blocks"],
]


@dataclasses.dataclass(frozen=True, eq=False)
class BlockSchedule:
    """The blocks that a kernel visits, in order.

    Attributes:
      layout: rows and columns of the kernel.
      block_q: queries of a block.
      block_kv: keys of a block.
      transposed: whether rows of blocks are keys, as in the backward kernel, instead of queries.
      rows: index of the block of queries, or of keys if transposed.
      cols: index of the block of keys, or of queries if transposed.
      kinds: `EMPTY`, `PARTIAL` or `FULL`. The backward kernel visits empty blocks to write zeros.
      partial: index into `offsets` of a partial block, -1 for others.
      offsets: for each distinct partial block, whether it holds entries, and its offset. With CSA all blocks of entries
        are distinct, and the offset is instead the block's index in [q_len, compressed_len], row by row.
    """

    layout: Layout
    block_q: int
    block_kv: int
    transposed: bool
    rows: Int32[np.ndarray, " blocks"]
    cols: Int32[np.ndarray, " blocks"]
    kinds: Int32[np.ndarray, " blocks"]
    partial: Int32[np.ndarray, " blocks"]
    offsets: Int32[np.ndarray, "unique 2"]

    def count(self, kind: int) -> int:
        """Number of blocks of that kind."""
        return int(np.count_nonzero(self.kinds == kind))

    def partial_blocks(
        self,
        place: Callable[[Int32[np.ndarray, " unique"]], Any] = np.asarray,
        attended: Bool[Array, "q_len compressed_len"] | None = None,
    ) -> Int8[Array | np.ndarray, "unique block_rows block_cols"]:
        """The masks of the distinct partial blocks, of block_q rows and block_kv columns, transposed if `transposed`.

        Args:
          place: converts the offsets. NumPy arrays are computed with on the host, JAX arrays inside the program, which
            then contains no large constant.
          attended: the entries that each row attends to; for CSA only.
        """
        rows, cols = np.arange(self.block_q, dtype=np.int32), np.arange(self.block_kv, dtype=np.int32)
        rows, cols = (
            (rows[None, None], cols[None, :, None]) if self.transposed else (rows[None, :, None], cols[None, None])
        )
        visibility = self.layout.visibility
        local, entries = (self.offsets[self.offsets[:, 0] == part, 1] for part in (0, 1))
        blocks = [visibility.sees_local(place(local)[:, None, None] + rows, cols)] if len(local) else []
        if len(entries) and attended is not None:
            grid_cols = self.layout.compressed_len // self.block_kv
            grid = attended.reshape(-1, self.block_q, grid_cols, self.block_kv)
            entry_blocks = grid[entries // grid_cols, :, entries % grid_cols]
            blocks.append(entry_blocks.swapaxes(1, 2) if self.transposed else entry_blocks)
        elif len(entries):
            blocks.append(visibility.sees_compressed(place(entries)[:, None, None] + rows, cols))
        return blocks[0].__array_namespace__().concatenate(blocks).view(np.int8)


def build(layout: Layout, block_q: int, block_kv: int, *, transposed: bool) -> BlockSchedule:
    """The schedule of a layout whose lengths are multiples of the block sizes.

    The number of distinct partial blocks does not depend on the sequence's length. It is at most
    `(block_q + block_kv + window) / g` for local keys, `g = gcd(block_q, block_kv)`, and
    `(block_q + block_kv * ratio) / g` for entries, `g = gcd(block_q, block_kv * ratio)`. Only with CSA, whose blocks of
    entries are all partial and distinct, it grows: they are half of `q_len * compressed_len / (block_q * block_kv)`.
    """
    parts = [_local_pairs(layout, block_q, block_kv)]
    if layout.entries:
        parts.append(_entry_pairs(layout, block_q, block_kv))
    q, kv, is_entry, offset, full = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((q, kv) if transposed else (kv, q))
    q, kv, is_entry, offset, full = (column[order] for column in (q, kv, is_entry, offset, full))

    is_partial = ~full
    offsets, which = np.unique(np.stack([is_entry, offset], axis=1)[is_partial], axis=0, return_inverse=True)
    partial = np.full(len(q), -1, np.int32)
    partial[is_partial] = which.reshape(-1)
    rows, cols = (kv, q) if transposed else (q, kv)
    return BlockSchedule(
        layout=layout,
        block_q=block_q,
        block_kv=block_kv,
        transposed=transposed,
        rows=rows.astype(np.int32),
        cols=cols.astype(np.int32),
        kinds=np.where(full, FULL, PARTIAL).astype(np.int32),
        partial=partial,
        offsets=offsets.astype(np.int32).reshape(-1, 2),
    )


def with_empty_rows(schedule: BlockSchedule, num_rows: int) -> BlockSchedule:
    """Adds an `EMPTY` first block to every row without blocks, so that the backward kernel writes zeros there."""
    missing = np.setdiff1d(np.arange(num_rows, dtype=np.int32), schedule.rows)
    at = np.searchsorted(schedule.rows, missing)
    return dataclasses.replace(
        schedule,
        rows=np.insert(schedule.rows, at, missing),
        cols=np.insert(schedule.cols, at, 0),
        kinds=np.insert(schedule.kinds, at, EMPTY),
        partial=np.insert(schedule.partial, at, -1),
    )


def _local_pairs(layout: Layout, block_q: int, block_kv: int) -> Blocks:
    """The active blocks of local keys."""
    window = layout.visibility.window
    r = np.arange(0, layout.q_len, block_q)
    first = np.maximum(r - window + 1, 0) // block_kv
    last = (r + block_q - 1) // block_kv
    q, kv = _ranges(first, last + 1)
    offset = q * block_q - kv * block_kv
    # The first query sees the last key, and the last query sees the first key.
    full = (offset - (block_kv - 1) >= 0) & (offset + block_q - 1 < window)
    return q, kv, np.zeros_like(q), offset, full


def _entry_pairs(layout: Layout, block_q: int, block_kv: int) -> Blocks:
    """The active blocks of entries."""
    ratio = layout.visibility.ratio
    r = np.arange(0, layout.q_len, block_q)
    complete = np.minimum(layout.visibility.num_entries(r + block_q), layout.compressed_len)
    q, kv = _ranges(np.zeros_like(r), -(-complete // block_kv))
    if layout.visibility.selects:
        index = q * (layout.compressed_len // block_kv) + kv
        return q, kv + layout.local_len // block_kv, np.ones_like(q), index, np.zeros_like(q, bool)
    offset = q * block_q - kv * block_kv * ratio
    full = (kv + 1) * block_kv <= layout.visibility.num_entries(q * block_q + 1)
    # If no entry becomes complete inside the block, its mask only depends on the number of complete entries.
    unchanged = (offset + 1) // ratio == (offset + block_q) // ratio
    offset = np.where(unchanged, (offset + 1) // ratio * ratio - 1, offset)
    return q, kv + layout.local_len // block_kv, np.ones_like(q), offset, full


def _ranges(
    first: Int[np.ndarray, " blocks_q"], stop: Int[np.ndarray, " blocks_q"]
) -> tuple[Int[np.ndarray, " blocks"], Int[np.ndarray, " blocks"]]:
    """All pairs (i, j) with `first[i] <= j < stop[i]`, in order."""
    count = np.maximum(stop - first, 0)
    i = np.repeat(np.arange(len(first)), count)
    j = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count) + first[i]
    return i, j
