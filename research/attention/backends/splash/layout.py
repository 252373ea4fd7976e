"""The layout of the splash kernel: rows `[queries | padding]`, columns `[local | padding | compressed | padding]`.

The local and the compressed keys start on block boundaries. The local part is at least as long as the padded queries.
So every row, also a padded one, sees its own local key, and no softmax is empty. The outputs of padded rows are dropped
and have zero cotangents.

There are at least three blocks of keys. Where tokamax's backward kernel visits active blocks only, each head reads the
dk of the previous head from memory and adds to it, while blocks are prefetched and written asynchronously. With one
block, only the last head's dk was left (found at S=1 with both versions). With two, a TPU may read dk before it is
written, which the interpreter does not show (tokamax 0.0.17 documents this and avoids it, 0.0.12 does not).
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from research.attention import visibility as visibility_lib
from research.attention.padding import pad, round_up

_FEWEST_KEY_BLOCKS = 3


@dataclasses.dataclass(frozen=True)
class Layout:
    """The numbers of the kernel's rows and columns.

    Attributes:
      visibility: which keys each query sees.
      seq_len: S, queries and local keys without padding.
      entries: C, compressed keys without padding.
      q_len: queries with padding.
      local_len: local keys with padding, and the column of the first compressed key.
      compressed_len: compressed keys with padding.
    """

    visibility: visibility_lib.Visibility
    seq_len: int
    entries: int
    q_len: int
    local_len: int
    compressed_len: int

    @property
    def kv_len(self) -> int:
        """All keys with padding."""
        return self.local_len + self.compressed_len

    def sees(self, row: Any, col: Any) -> Any:
        """Whether a row sees a column, without regard to documents and selection.

        Padding needs no case of its own: no query sees a later token or an incomplete entry.

        Args:
          row: integers, NumPy or JAX.
          col: likewise, broadcast against `row`.
        """
        seen = self.visibility.sees_local(row, col) & (col < self.local_len)
        if self.entries:
            seen |= self.visibility.sees_compressed(row, col - self.local_len) & (col >= self.local_len)
        return seen

    def pad_queries(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """Pads `axis` from S to `q_len` with zeros."""
        return pad(x, axis, 0, self.q_len - x.shape[axis], 0)

    def join_keys(self, local: Float[Array, "B S D"], compressed: Float[Array, "B C D"]) -> Float[Array, "B kv_len D"]:
        """The keys of the columns."""
        local = pad(local, 1, 0, self.local_len - local.shape[1], 0)
        return jnp.concatenate([local, pad(compressed, 1, 0, self.compressed_len - compressed.shape[1], 0)], axis=1)

    def segment_ids(self, segments: Int32[Array, "B S"]) -> tuple[Int32[Array, "B q_len"], Int32[Array, "B kv_len"]]:
        """The segments of rows and columns, which the kernel compares for equality.

        Padding sees padding, so that no softmax is empty. No row sees entries that straddle documents.
        """
        row_ids = pad(segments, 1, 0, self.q_len - segments.shape[1], visibility_lib.PADDING)
        col_ids = pad(segments, 1, 0, self.local_len - segments.shape[1], visibility_lib.PADDING)
        if self.entries:
            entries = visibility_lib.entry_segments(segments, self.visibility.ratio)
            entries = pad(entries, 1, 0, self.compressed_len - entries.shape[1], visibility_lib.STRADDLES)
            col_ids = jnp.concatenate([col_ids, entries], axis=1)
        return row_ids, col_ids

    def runtime_mask(
        self,
        row_ids: Int32[Array, " q_len"] | None,
        col_ids: Int32[Array, " kv_len"] | None,
        selected: Bool[Array, "S C"] | None,
    ) -> Bool[Array, "q_len kv_len"]:
        """The mask of one sequence, from its `segment_ids` and its selected entries."""
        mask = self.sees(jnp.arange(self.q_len)[:, None], jnp.arange(self.kv_len)[None])
        if row_ids is not None:
            mask &= row_ids[:, None] == col_ids[None]
        if selected is not None:
            padding = ((0, self.q_len - self.seq_len), (self.local_len, self.compressed_len - self.entries))
            local = jnp.arange(self.kv_len) < self.local_len
            mask &= local[None] | jnp.pad(selected, padding)
        return mask


def make(
    visibility: visibility_lib.Visibility, seq_len: int, block_q: Iterable[int], block_kv: Iterable[int]
) -> Layout:
    """The smallest layout whose lengths are multiples of all the block sizes."""
    q_len = round_up(seq_len, math.lcm(*block_q))
    kv_multiple = math.lcm(*block_kv)
    entries = visibility.num_entries(seq_len)
    compressed_len = round_up(entries, kv_multiple)
    return Layout(
        visibility=visibility,
        seq_len=seq_len,
        entries=entries,
        q_len=q_len,
        local_len=max(round_up(q_len, kv_multiple), _FEWEST_KEY_BLOCKS * kv_multiple - compressed_len),
        compressed_len=compressed_len,
    )
