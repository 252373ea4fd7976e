"""Visibility: which keys each query sees. The rule is written in this module only.

A query at token t sees

* the local key at token j if `0 <= t - j < window`, and
* the compressed entry c, which pools the tokens `[c * ratio, (c + 1) * ratio)`, if these are all at or before t.

With packing, both must be in the query's document (`same_segment`). With `CompressedSparse`, entries must also be
selected by the indexer. Source: DeepSeek-V4, sections 2.3.1 (CSA) and 2.3.2 (HCA).

The functions take NumPy or JAX integer arrays (or plain integers) that broadcast against each other, and return
booleans of the broadcast shape: schedules use NumPy, masks in programs use JAX. So their types are `Any`.

Tokens and entries are indices in the whole sequence. A caller that holds a part of it, such as a shard or a step of
decoding, adds the offset of its first token.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from research.settings.attention import Attention

PADDING = -1  # the segment of padding tokens, which see no key and are not seen
STRADDLES = -2  # the segment of entries that pool tokens of several documents or padding


@dataclasses.dataclass(frozen=True)
class SlidingWindow:
    """The last `window` local keys, including the query's own."""

    window: int
    kind: ClassVar[str] = "sliding"
    compresses: ClassVar[bool] = False  # whether there are compressed entries
    overlaps: ClassVar[bool] = False  # whether an entry also pools the window before its own
    selects: ClassVar[bool] = False  # whether a query only sees entries that the indexer selected
    bands: ClassVar[bool] = True  # whether the visible keys of a query are a range that moves with the query

    @classmethod
    def make(cls, settings: "Attention") -> "SlidingWindow":
        """The visibility of this kind for the settings."""
        return cls(settings.window)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{type(self).__name__}.{field.name}={getattr(self, field.name)}: must be positive")

    @property
    def reach(self) -> int:
        """Number of local keys, counted back from the query's own, among which are all that it sees."""
        return self.window

    @property
    def stride(self) -> int:
        """Tokens between the starts of consecutive entries; 1 if there are no entries."""
        return 1

    def local_mask(self, t: Any, j: Any, query_segments: Any, key_segments: Any) -> Any:
        """Whether the query at token `t` sees the local key at token `j`.

        Args:
          t: tokens of the queries.
          j: tokens of the keys.
          query_segments: segments of the queries, `PADDING` for padding.
          key_segments: segments of the keys.
        """
        return self.sees_local(t, j) & same_segment(query_segments, key_segments)

    def sees_local(self, t: Any, j: Any) -> Any:
        """As `local_mask`, without regard to documents."""
        return (t - j >= 0) & (t - j < self.window)

    def local_range(self, t: Any, starts: Any) -> tuple[Any, Any]:
        """The local keys that the query at token `t` sees, as the first one and the one after the last.

        Args:
          t: tokens of the queries.
          starts: the first tokens of their documents, whose tokens are consecutive; `PADDING` sees none.
        """
        first = (t - self.window + 1).clip(starts)
        return (first * (starts >= 0)).clip(0), (t + 1) * (starts >= 0)

    def num_entries(self, seq_len: Any) -> Any:
        """Number of complete entries of a sequence: 0."""
        return seq_len * 0

    def pairs(self, seq_len: int) -> int:
        """Number of pairs of a query and a visible key, local or entry, in a sequence of one document."""
        tokens = np.arange(1, seq_len + 1, dtype=np.int64)
        return int(np.minimum(tokens, self.window).sum() + self._entries_seen(tokens).sum())

    def _entries_seen(self, tokens: Any) -> Any:
        """Number of entries that the query at token `tokens - 1` sees."""
        return self.num_entries(tokens)


@dataclasses.dataclass(frozen=True)
class HeavilyCompressed(SlidingWindow):
    """A sliding window, and all complete entries of `ratio` tokens."""

    ratio: int
    kind: ClassVar[str] = "hca"
    compresses: ClassVar[bool] = True

    @classmethod
    def make(cls, settings: "Attention") -> "HeavilyCompressed":
        """See `SlidingWindow.make`."""
        return cls(settings.window, settings.hca_ratio)

    @property
    def stride(self) -> int:
        """See `SlidingWindow.stride`."""
        return self.ratio

    def entry_mask(self, t: Any, c: Any, query_segments: Any, entry_segments: Any, selected: Any = None) -> Any:
        """Whether the query at token `t` sees entry `c`.

        Args:
          t: tokens of the queries.
          c: entries.
          query_segments: as `local_mask`.
          entry_segments: segments of the entries, by the function `entry_segments`.
          selected: booleans, the entries that the indexer selected; None is all.
        """
        mask = self.sees_compressed(t, c) & same_segment(query_segments, entry_segments)
        return mask if selected is None else mask & selected

    def sees_compressed(self, t: Any, c: Any) -> Any:
        """As `entry_mask`, without regard to documents and selection: whether entry `c` is complete at token `t`."""
        return (c + 1) * self.ratio <= t + 1

    def entry_range(self, t: Any, starts: Any) -> tuple[Any, Any]:
        """The entries that the query at token `t` sees, without regard to selection; as `local_range`."""
        first = -(-starts.clip(0) // self.ratio)
        return first, first.clip((t + 1) // self.ratio) * (starts >= 0)

    def num_entries(self, seq_len: Any) -> Any:
        """Number of complete entries of a sequence. An incomplete last window has no entry."""
        return seq_len // self.ratio


@dataclasses.dataclass(frozen=True)
class CompressedSparse(HeavilyCompressed):
    """A sliding window, and the `top_k` complete entries that the indexer selected."""

    top_k: int
    kind: ClassVar[str] = "csa"
    overlaps: ClassVar[bool] = True
    selects: ClassVar[bool] = True

    @classmethod
    def make(cls, settings: "Attention") -> "CompressedSparse":
        """See `SlidingWindow.make`."""
        return cls(settings.window, settings.csa_ratio, settings.top_k)

    def unselected(self) -> HeavilyCompressed:
        """The visibility before the selection: all complete entries."""
        return HeavilyCompressed(self.window, self.ratio)

    def _entries_seen(self, tokens: Any) -> Any:
        return np.minimum(self.num_entries(tokens), self.top_k)


Visibility = SlidingWindow | HeavilyCompressed | CompressedSparse
KINDS = {cls.kind: cls for cls in (SlidingWindow, HeavilyCompressed, CompressedSparse)}


def same_segment(query_segments: Any, key_segments: Any) -> Any:
    """Whether query and key are in the same document. Padding is in none."""
    return (query_segments == key_segments) & (query_segments >= 0)


def entry_segments(segments: Any, ratio: int) -> Any:
    """Segments of the entries.

    Args:
      segments: segments of the tokens, integers [..., S], NumPy or JAX.
      ratio: tokens per entry.

    Returns:
      [..., C] in the same dtype: the segment of the pooled tokens if they are all in one document, else `STRADDLES`.
    """
    xp = segments.__array_namespace__()
    entries = segments.shape[-1] // ratio
    windows = segments[..., : entries * ratio].reshape(*segments.shape[:-1], entries, ratio)
    first = windows[..., :1]
    whole = xp.all(windows == first, axis=-1) & (first[..., 0] >= 0)
    return xp.where(whole, first[..., 0], STRADDLES).astype(segments.dtype)
