"""Block schedules in closed form: NumPy, in time proportional to the active blocks.

A block of queries starts at row r, a block of keys at local token j or at entry c. Both parts of the visibility are
bands, so which blocks meet them follows from comparing ends, and what a partly visible block looks like follows from
one offset: `r - j` for local keys, `r - c * ratio` for entries (`Layout.sees` is unchanged when all shift together).
Of CSA's entries, which only the indexer knows, follow the blocks that a query could reach; their content comes later.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from research.attention.backends.splash.layout import Layout

EMPTY, PARTIAL, FULL = 0, 1, 2  # tokamax's numbering


@dataclasses.dataclass(frozen=True, eq=False)
class BlockSchedule:
    """The blocks a kernel visits, in order.

    Attributes:
      layout: rows and columns.
      block_q: rows of a block.
      block_kv: columns of a block.
      transposed: whether blocks go by columns first, as the backward kernel visits them.
      rows: int32 [blocks], which block of queries (of keys, if transposed).
      cols: int32 [blocks], which block of keys (of queries, if transposed).
      kinds: int32 [blocks], `EMPTY`, `PARTIAL` or `FULL`. Empty ones are there to be zeroed by the backward kernel.
      partial: int32 [blocks], index into `offsets` of a partial block, -1 for others.
      offsets: int32 [unique, 2], for each distinct partial block whether it holds entries, and its offset; of CSA's
        entries, where no two are alike, its number among all blocks [q_len, compressed_len] row by row.
    """

    layout: Layout
    block_q: int
    block_kv: int
    transposed: bool
    rows: np.ndarray
    cols: np.ndarray
    kinds: np.ndarray
    partial: np.ndarray
    offsets: np.ndarray

    def count(self, kind: int) -> int:
        """Number of blocks of that kind."""
        return int(np.count_nonzero(self.kinds == kind))

    def partial_blocks(self, place: Callable[[np.ndarray], Any] = np.asarray, attended: Any = None) -> Any:
        """The distinct partial blocks as int8 [unique, block_q, block_kv], its last axes swapped if transposed.

        Args:
          place: puts the offsets where the blocks are to be made: NumPy makes them on the host, a JAX array inside
            the program, which then carries no large constant.
          attended: of CSA, which entries each row attends, bool [q_len, compressed_len].
        """
        rows, cols = np.arange(self.block_q, dtype=np.int32), np.arange(self.block_kv, dtype=np.int32)
        rows, cols = (
            (rows[None, None], cols[None, :, None]) if self.transposed else (rows[None, :, None], cols[None, None])
        )
        visibility = self.layout.visibility
        local, of_entries = (self.offsets[self.offsets[:, 0] == part, 1] for part in (0, 1))
        blocks = [visibility.sees_local(place(local)[:, None, None] + rows, cols)] if len(local) else []
        if len(of_entries) and attended is not None:
            across = self.layout.compressed_len // self.block_kv
            grid = attended.reshape(-1, self.block_q, across, self.block_kv)
            some = grid[of_entries // across, :, of_entries % across]
            blocks.append(some.swapaxes(1, 2) if self.transposed else some)
        elif len(of_entries):
            blocks.append(visibility.sees_compressed(place(of_entries)[:, None, None] + rows, cols))
        return blocks[0].__array_namespace__().concatenate(blocks).view(np.int8)


def build(layout: Layout, block_q: int, block_kv: int, *, transposed: bool) -> BlockSchedule:
    """The schedule of a layout whose lengths the blocks divide.

    The number of distinct partial blocks does not grow with the sequence: at most
    `(block_q + block_kv + window) / g` for local keys, `g = gcd(block_q, block_kv)`, and
    `(block_q + block_kv * ratio) / g` for entries, `g = gcd(block_q, block_kv * ratio)`. CSA's blocks of entries, all
    partial and distinct, do: half of `q_len * compressed_len / (block_q * block_kv)`.
    """
    parts = [_local_pairs(layout, block_q, block_kv)]
    if layout.entries:
        parts.append(_entry_pairs(layout, block_q, block_kv))
    q, kv, of_entries, offset, full = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((q, kv) if transposed else (kv, q))
    q, kv, of_entries, offset, full = (column[order] for column in (q, kv, of_entries, offset, full))

    is_partial = ~full
    offsets, which = np.unique(np.stack([of_entries, offset], axis=1)[is_partial], axis=0, return_inverse=True)
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
    """Adds an `EMPTY` first block to every row without one: the backward kernel zeroes what no query sees."""
    missing = np.setdiff1d(np.arange(num_rows, dtype=np.int32), schedule.rows)
    at = np.searchsorted(schedule.rows, missing)
    return dataclasses.replace(
        schedule,
        rows=np.insert(schedule.rows, at, missing),
        cols=np.insert(schedule.cols, at, 0),
        kinds=np.insert(schedule.kinds, at, EMPTY),
        partial=np.insert(schedule.partial, at, -1),
    )


def _local_pairs(layout: Layout, block_q: int, block_kv: int) -> tuple[np.ndarray, ...]:
    """Active blocks of local keys: q and kv block, 0, offset, whether full."""
    window = layout.visibility.window
    r = np.arange(0, layout.q_len, block_q)
    first = np.maximum(r - window + 1, 0) // block_kv
    last = (r + block_q - 1) // block_kv
    q, kv = _ranges(first, last + 1)
    offset = q * block_q - kv * block_kv
    # The block's ends furthest apart: no key lies after the first query, none a window before the last.
    full = (offset - (block_kv - 1) >= 0) & (offset + block_q - 1 < window)
    return q, kv, np.zeros_like(q), offset, full


def _entry_pairs(layout: Layout, block_q: int, block_kv: int) -> tuple[np.ndarray, ...]:
    """Active blocks of compressed entries: q and kv block, 1, offset, whether full."""
    ratio = layout.visibility.ratio
    r = np.arange(0, layout.q_len, block_q)
    complete = np.minimum(layout.visibility.num_entries(r + block_q), layout.compressed_len)
    q, kv = _ranges(np.zeros_like(r), -(-complete // block_kv))
    if layout.visibility.selects:
        number = q * (layout.compressed_len // block_kv) + kv
        return q, kv + layout.local_len // block_kv, np.ones_like(q), number, np.zeros_like(q, bool)
    offset = q * block_q - kv * block_kv * ratio
    full = (kv + 1) * block_kv <= layout.visibility.num_entries(q * block_q + 1)
    # While no entry is completed inside the block its rows look alike, wherever between two completions it starts.
    unchanged = (offset + 1) // ratio == (offset + block_q) // ratio
    offset = np.where(unchanged, (offset + 1) // ratio * ratio - 1, offset)
    return q, kv + layout.local_len // block_kv, np.ones_like(q), offset, full


def _ranges(first: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All pairs (i, j) with `first[i] <= j < stop[i]`, in order."""
    count = np.maximum(stop - first, 0)
    i = np.repeat(np.arange(len(first)), count)
    j = np.arange(len(i)) - np.repeat(np.cumsum(count) - count, count) + first[i]
    return i, j
