"""Who sees whom: the only place where the rule is written.

Every function takes NumPy or JAX integer arrays that broadcast against each other (schedules and oracles use
the former, dense masks and kernels the latter) and returns a boolean array of the broadcast shape.

A query token t, counted on the sequence grid, sees

* local key j where `0 <= t - j < window`, and
* compressed entry c, which pools the tokens `[c * ratio, (c + 1) * ratio)`, where that window is complete at t.

Packing narrows both to one document (`same_segment`); `CompressedSparse` narrows the entries further to those
that the indexer selected. Source: DeepSeek-V4, sections 2.3.1 (CSA) and 2.3.2 (HCA).
"""

import dataclasses
from typing import Any, ClassVar

import numpy as np

PADDING = -1  # segment id of a token that neither sees nor is seen
STRADDLES = -2  # segment id of a compressed entry whose window spans documents or padding


@dataclasses.dataclass(frozen=True)
class SlidingWindow:
    """The last `window` local keys, the query's own included."""

    window: int
    kind: ClassVar[str] = "sliding"
    compresses: ClassVar[bool] = False  # whether there are compressed entries
    selects: ClassVar[bool] = False  # whether a query sees no more of them than an indexer selected

    def __post_init__(self):
        _require_positive(self, "window")

    def local_mask(self, t: Any, j: Any, of_query: Any = None, of_key: Any = None) -> Any:
        """Whether the query at token `t` sees the local key at token `j`.

        Args:
          t: tokens of the queries on the sequence grid; a shard of a sequence counts from where it starts.
          j: tokens of the keys.
          of_query: segments of the queries; without, all is one document.
          of_key: segments of the keys.
        """
        return _in_document(self.sees_local(t, j), of_query, of_key)

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

    def __post_init__(self):
        super().__post_init__()
        _require_positive(self, "ratio")

    def entry_mask(self, t: Any, c: Any, of_query: Any = None, of_entry: Any = None, chosen: Any = None) -> Any:
        """Whether the query at token `t` sees entry `c`.

        Args:
          t: as `local_mask`.
          c: entries.
          of_query: as `local_mask`.
          of_entry: segments of the entries, as `entry_segments` gives them.
          chosen: booleans, the indexer's choice; without, entries are visible as they complete.
        """
        mask = _in_document(self.sees_compressed(t, c), of_query, of_entry)
        return mask if chosen is None else mask & chosen

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
    selects: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        _require_positive(self, "top_k")

    def _entries_seen(self, tokens: Any) -> Any:
        return np.minimum(self.num_entries(tokens), self.top_k)


Visibility = SlidingWindow | HeavilyCompressed | CompressedSparse


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


def _in_document(mask: Any, of_query: Any, of_key: Any) -> Any:
    return mask if of_query is None else mask & same_segment(of_query, of_key)


def _require_positive(visibility, field: str) -> None:
    value = getattr(visibility, field)
    if value <= 0:
        raise ValueError(f"{type(visibility).__name__}.{field}={value}: must be a positive integer")
