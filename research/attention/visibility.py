"""Who sees whom: the only place where the rule is written.

Every function takes NumPy or JAX integer arrays that broadcast against each other (schedules and oracles use
the former, dense masks and kernels the latter) and returns a boolean array of the broadcast shape.

Tokens and entries are counted on the grid of the whole sequence. Whoever holds only some of its rows, as a shard of it
or a step of decoding, adds the OFFSET of its first row: the rule is the same. A query token t sees

* local key j where `0 <= t - j < window`, and
* compressed entry c, which pools the tokens `[c * ratio, (c + 1) * ratio)`, where that window is complete at t.

Packing narrows both to one document (`same_segment`); `CompressedSparse` narrows the entries further to those
that the indexer selected. Source: DeepSeek-V4, sections 2.3.1 (CSA) and 2.3.2 (HCA).
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from research.settings.attention import Attention

PADDING = -1  # segment id of a token that neither sees nor is seen
STRADDLES = -2  # segment id of a compressed entry whose window spans documents or padding


@dataclasses.dataclass(frozen=True)
class SlidingWindow:
    """The last `window` local keys, the query's own included."""

    window: int
    kind: ClassVar[str] = "sliding"
    compresses: ClassVar[bool] = False  # whether there are compressed entries
    overlaps: ClassVar[bool] = False  # whether an entry pools the window before its own, too
    selects: ClassVar[bool] = False  # whether a query sees no more of them than an indexer selected
    bands: ClassVar[bool] = True  # whether the keys that a query sees have two ends, which move with the query

    @classmethod
    def make(cls, settings: "Attention") -> "SlidingWindow":
        """The visibility of that kind of layers."""
        return cls(settings.window)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{type(self).__name__}.{field.name}={getattr(self, field.name)}: must be positive")

    @property
    def stride(self) -> int:
        """Tokens from the start of an entry to that of the next one; 1 where there are none."""
        return 1

    def local_mask(self, t: Any, j: Any, query_segments: Any, key_segments: Any) -> Any:
        """Whether the query at token `t` sees the local key at token `j`.

        Args:
          t: tokens of the queries.
          j: tokens of the keys.
          query_segments: the documents of the queries, `PADDING` for none.
          key_segments: likewise of the keys.
        """
        return self.sees_local(t, j) & same_segment(query_segments, key_segments)

    def sees_local(self, t: Any, j: Any) -> Any:
        """Whether the query at token `t` sees the local key at token `j`, documents aside."""
        return (t - j >= 0) & (t - j < self.window)

    def num_entries(self, seq_len: Any) -> Any:
        """Number of compressed entries of that many tokens: none."""
        return seq_len * 0

    def pairs(self, seq_len: int) -> int:
        """Pairs of a query and a key it sees, selected entries included, in a sequence that is one document."""
        tokens = np.arange(1, seq_len + 1, dtype=np.int64)
        return int(np.minimum(tokens, self.window).sum() + self._entries_seen(tokens).sum())

    def _entries_seen(self, tokens: Any) -> Any:
        """How many entries the last of that many tokens sees."""
        return self.num_entries(tokens)


@dataclasses.dataclass(frozen=True)
class HeavilyCompressed(SlidingWindow):
    """A sliding window plus every completed entry of `ratio` tokens."""

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
          entry_segments: of the entries, as the function of that name gives them.
          selected: booleans, the indexer's choice; without, entries are visible as they complete.
        """
        mask = self.sees_compressed(t, c) & same_segment(query_segments, entry_segments)
        return mask if selected is None else mask & selected

    def sees_compressed(self, t: Any, c: Any) -> Any:
        """Whether entry `c` is complete at token `t`, documents and selection aside."""
        return (c + 1) * self.ratio <= t + 1

    def num_entries(self, seq_len: Any) -> Any:
        """Number of complete entries of that many tokens; an unfinished last window does not exist."""
        return seq_len // self.ratio


@dataclasses.dataclass(frozen=True)
class CompressedSparse(HeavilyCompressed):
    """As `HeavilyCompressed`, of the completed entries only the `top_k` that the indexer selected."""

    top_k: int
    kind: ClassVar[str] = "csa"
    overlaps: ClassVar[bool] = True
    selects: ClassVar[bool] = True

    @classmethod
    def make(cls, settings: "Attention") -> "CompressedSparse":
        """See `SlidingWindow.make`."""
        return cls(settings.window, settings.csa_ratio, settings.top_k)

    def unselected(self) -> HeavilyCompressed:
        """The same before the indexer selects: every completed entry."""
        return HeavilyCompressed(self.window, self.ratio)

    def _entries_seen(self, tokens: Any) -> Any:
        return np.minimum(self.num_entries(tokens), self.top_k)


Visibility = SlidingWindow | HeavilyCompressed | CompressedSparse
KINDS = {cls.kind: cls for cls in (SlidingWindow, HeavilyCompressed, CompressedSparse)}  # of attention layers


def same_segment(query_segments: Any, key_segments: Any) -> Any:
    """Whether query and key lie in the same document; padding lies in none."""
    return (query_segments == key_segments) & (query_segments >= 0)


def entry_segments(segments: Any, ratio: int) -> Any:
    """Segment ids of the compressed entries.

    Args:
      segments: integer [..., S], >= 0 for a document, `PADDING` otherwise.
      ratio: tokens per entry.

    Returns:
      [..., S // ratio] of the same dtype: the id of the document that holds the whole window, else `STRADDLES`.
    """
    xp = segments.__array_namespace__()
    entries = segments.shape[-1] // ratio
    windows = segments[..., : entries * ratio].reshape(*segments.shape[:-1], entries, ratio)
    first = windows[..., :1]
    whole = xp.all(windows == first, axis=-1) & (first[..., 0] >= 0)
    return xp.where(whole, first[..., 0], STRADDLES).astype(segments.dtype)
