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

    def __post_init__(self):
        _require_positive(self, "window")

    def sees_local(self, t: Any, j: Any) -> Any:
        """Whether the query at token `t` sees the local key at token `j`, documents aside."""
        return (t - j >= 0) & (t - j < self.window)

    def num_entries(self, seq_len: int) -> int:
        """Number of compressed entries of a sequence: none."""
        del seq_len
        return 0


@dataclasses.dataclass(frozen=True)
class HeavilyCompressed(SlidingWindow):
    """A sliding window plus every completed entry of `ratio` tokens."""

    ratio: int
    kind: ClassVar[str] = "hca"

    def __post_init__(self):
        super().__post_init__()
        _require_positive(self, "ratio")

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

    def __post_init__(self):
        super().__post_init__()
        _require_positive(self, "top_k")


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


def visible_pairs(visibility: Visibility, seq_len: int) -> int:
    """Pairs of a query and a key it sees, selected entries included, in a sequence that is one document."""
    t = np.arange(seq_len, dtype=np.int64)
    pairs = np.minimum(t + 1, visibility.window).sum()
    if visibility.kind != "sliding":
        complete = visibility.num_entries(t + 1)
        pairs += (np.minimum(complete, visibility.top_k) if visibility.kind == "csa" else complete).sum()
    return int(pairs)


def _require_positive(visibility, field: str) -> None:
    value = getattr(visibility, field)
    if value <= 0:
        raise ValueError(f"{type(visibility).__name__}.{field}={value}: must be a positive integer")
