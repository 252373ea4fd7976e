"""Where the splash kernel's rows and columns lie: queries `[q | pad]`, keys `[local | pad | compressed | pad]`.

Both key parts start on a block boundary. The local part is at least as long as the padded queries, so that every
row of the kernel, a padded one too, sees its own local key: no softmax is ever empty and nothing is ever 0 / 0.
What padding computes is thrown away afterwards, with a zero cotangent.

There are at least three key blocks. Where tokamax schedules the backward kernel over active blocks, each head adds its
part to the dk of the head before, through memory, and the next block is fetched while the last one is still being
written: with one block only the last head's part was left (found at S=1, both versions), with two a TPU may read too
early, which no interpreter shows (tokamax 0.0.17 says so and takes another way, 0.0.12 does not).
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
    """Lengths of the kernel's rows and columns.

    Attributes:
      visibility: who sees whom.
      seq_len: S, real queries and local keys.
      entries: C, real compressed keys.
      q_len: padded queries.
      local_len: padded local keys; the compressed keys start here.
      compressed_len: padded compressed keys.
    """

    visibility: visibility_lib.Visibility
    seq_len: int
    entries: int
    q_len: int
    local_len: int
    compressed_len: int

    @property
    def kv_len(self) -> int:
        """Padded keys in all."""
        return self.local_len + self.compressed_len

    def sees(self, row: Any, col: Any) -> Any:
        """Whether the kernel's row sees its column, documents and selection aside; NumPy or JAX integers.

        The rule needs no case for padding: a real row sees neither a later token nor an unfinished entry.
        """
        seen = self.visibility.sees_local(row, col) & (col < self.local_len)
        if self.entries:
            seen |= self.visibility.sees_compressed(row, col - self.local_len) & (col >= self.local_len)
        return seen

    def pad_queries(self, x: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
        """Pads `axis` from S to `q_len` with zeros."""
        return pad(x, axis, 0, self.q_len - x.shape[axis], 0)

    def join_keys(self, local: Float[Array, "B S D"], compressed: Float[Array, "B C D"]) -> Float[Array, "B kv_len D"]:
        """The columns' keys."""
        local = pad(local, 1, 0, self.local_len - local.shape[1], 0)
        return jnp.concatenate([local, pad(compressed, 1, 0, self.compressed_len - compressed.shape[1], 0)], axis=1)

    def segment_ids(self, segments: Int32[Array, "B S"]) -> tuple[Int32[Array, "B q_len"], Int32[Array, "B kv_len"]]:
        """The ids of rows and columns, to be compared for equality.

        Padded tokens see each other and themselves (see the module's docstring), straddling entries nobody.
        """
        rows = pad(segments, 1, 0, self.q_len - segments.shape[1], visibility_lib.PADDING)
        cols = pad(segments, 1, 0, self.local_len - segments.shape[1], visibility_lib.PADDING)
        if self.entries:
            entries = visibility_lib.entry_segments(segments, self.visibility.ratio)
            entries = pad(entries, 1, 0, self.compressed_len - entries.shape[1], visibility_lib.STRADDLES)
            cols = jnp.concatenate([cols, entries], axis=1)
        return rows, cols

    def runtime_mask(
        self,
        rows: Int32[Array, " q_len"] | None,
        cols: Int32[Array, " kv_len"] | None,
        selected: Bool[Array, "S C"] | None,
    ) -> Bool[Array, "q_len kv_len"]:
        """The mask of one sequence, from its `segment_ids` and the indexer's choice."""
        mask = self.sees(jnp.arange(self.q_len)[:, None], jnp.arange(self.kv_len)[None])
        if rows is not None:
            mask &= rows[:, None] == cols[None]
        if selected is not None:
            padding = ((0, self.q_len - self.seq_len), (self.local_len, self.compressed_len - self.entries))
            local = jnp.arange(self.kv_len) < self.local_len
            mask &= local[None] | jnp.pad(selected, padding)
        return mask


def make(
    visibility: visibility_lib.Visibility, seq_len: int, block_q: Iterable[int], block_kv: Iterable[int]
) -> Layout:
    """The layout whose lengths every block size given divides."""
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
