"""Draws who sees whom under the three kinds of attention: `python analysis/patterns.py`, as in the README."""

import io
import pathlib
from typing import NamedTuple

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np

from analysis import style
from research.attention.visibility import (
    CompressedSparse,
    HeavilyCompressed,
    SlidingWindow,
    Visibility,
    entry_segments,
)

# Small enough to see: DeepSeek-V4 has a window of 128, ratios of 128 and 4, and a top-k of 512.
SEQ_LEN, WINDOW = 48, 8
KINDS = {
    "sliding window": SlidingWindow(WINDOW),
    "HCA: every completed entry": HeavilyCompressed(WINDOW, ratio=8),
    "CSA: the top 3 completed entries": CompressedSparse(WINDOW, ratio=4, top_k=3),
}
ONE_DOCUMENT = np.zeros(SEQ_LEN, np.int32)
_UNSEEN, _LOCAL, _ENTRY, _PASSED_OVER = range(4)
_COLOURS = (style.EMPTY, style.COLOURS[0], style.COLOURS[1], "#F3CF8A")


class Panel(NamedTuple):
    """A visibility over a row of tokens whose documents are `segments`, int32 [S], -1 for padding."""

    title: str
    visibility: Visibility
    segments: np.ndarray = ONE_DOCUMENT


def picture(panel: Panel, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """What each query makes of each local key [S, S] and entry [S, C], as an index into the colours.

    The indexer's scores of CSA are drawn at random.
    """
    visibility, segments = panel.visibility, panel.segments
    t = np.arange(SEQ_LEN)[:, None]
    near = visibility.local_mask(t, np.arange(SEQ_LEN), segments[:, None], segments)
    local = np.where(near, _LOCAL, _UNSEEN)
    entries = visibility.num_entries(SEQ_LEN)
    if not entries:
        return local, np.zeros((SEQ_LEN, 0), int)
    entry_ids = entry_segments(segments, visibility.ratio)
    complete = visibility.entry_mask(t, np.arange(entries), segments[:, None], entry_ids)
    chosen = complete
    if visibility.selects:
        scores = np.where(complete, np.random.default_rng(seed).random(complete.shape), -1.0)
        chosen = complete & (np.argsort(np.argsort(-scores)) < visibility.top_k)
    return local, np.where(chosen, _ENTRY, np.where(complete, _PASSED_OVER, _UNSEEN))


def draw(panels: list[Panel], file: pathlib.Path | io.BytesIO) -> None:
    """Writes a PNG of panels, three a row; lines are drawn where documents or padding begin."""
    rows = len(panels) // 3
    widths = [SEQ_LEN + panel.visibility.num_entries(SEQ_LEN) + 2 for panel in panels[:3]]
    figure, grid = plt.subplots(
        rows, 3, figsize=(12, 0.5 + 3.6 * rows), layout="constrained", gridspec_kw={"width_ratios": widths}
    )
    colours = matplotlib.colors.ListedColormap(_COLOURS)
    for axis, panel in zip(grid.flat, panels, strict=True):
        local, entries = picture(panel)
        gap = np.full((SEQ_LEN, 2 if entries.shape[1] else 0), np.nan)
        axis.imshow(np.concatenate([local, gap, entries], axis=1), cmap=colours, vmin=-0.5, vmax=3.5, aspect="auto")
        for start in np.flatnonzero(np.diff(panel.segments)) + 0.5:
            axis.axhline(start, color="black", linewidth=0.8, linestyle="--")
        axis.set_title(panel.title)
        axis.set_xlabel("local keys" + (" | compressed entries" if entries.shape[1] else ""))
        axis.set_xticks([])
        axis.set_yticks([0, SEQ_LEN - 1])
    for axis in grid.flat[::3]:
        axis.set_ylabel("query token")
    labels = {_LOCAL: "local key seen", _ENTRY: "entry seen", _PASSED_OVER: "entry complete, not selected"}
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in labels]
    figure.legend(handles, labels.values(), loc="outside lower center", ncols=3, frameon=False)
    style.save(figure, file)


if __name__ == "__main__":
    target = pathlib.Path(__file__).parent / "figures" / "patterns.png"
    draw([Panel(title, visibility) for title, visibility in KINDS.items()], target)
    print(target)
