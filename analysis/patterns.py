"""Draws who sees whom under the three kinds of attention: `python analysis/patterns.py`, as in the README."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np

from research.attention.visibility import CompressedSparse, HeavilyCompressed, SlidingWindow, Visibility

# Small enough to see: DeepSeek-V4 has a window of 128, ratios of 128 and 4, and a top-k of 512.
SEQ_LEN, WINDOW = 48, 8
KINDS = (
    ("sliding window", SlidingWindow(WINDOW)),
    ("HCA: every completed entry", HeavilyCompressed(WINDOW, ratio=8)),
    ("CSA: the top 3 completed entries", CompressedSparse(WINDOW, ratio=4, top_k=3)),
)
_UNSEEN, _LOCAL, _ENTRY, _PASSED_OVER = range(4)
_COLOURS = ("#F2F2F2", "#0072B2", "#E69F00", "#F6DDB0")


def picture(visibility: Visibility, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """What each query makes of each local key [S, S] and entry [S, C], as an index into the colours.

    The indexer's scores of CSA are drawn at random.
    """
    t = np.arange(SEQ_LEN)[:, None]
    local = np.where(visibility.sees_local(t, np.arange(SEQ_LEN)), _LOCAL, _UNSEEN)
    entries = visibility.num_entries(SEQ_LEN)
    if not entries:
        return local, np.zeros((SEQ_LEN, 0), int)
    complete = visibility.sees_compressed(t, np.arange(entries))
    chosen = complete
    if visibility.kind == "csa":
        scores = np.where(complete, np.random.default_rng(seed).random(complete.shape), -1.0)
        chosen = complete & (np.argsort(np.argsort(-scores)) < visibility.top_k)
    return local, np.where(chosen, _ENTRY, np.where(complete, _PASSED_OVER, _UNSEEN))


def draw(path: pathlib.Path) -> None:
    """Writes the picture as a PNG."""
    panels = [picture(visibility) for _, visibility in KINDS]
    widths = [local.shape[1] + entries.shape[1] + 2 for local, entries in panels]
    figure, axes = plt.subplots(
        1, len(KINDS), figsize=(12, 4.1), layout="constrained", gridspec_kw={"width_ratios": widths}
    )
    colours = matplotlib.colors.ListedColormap(_COLOURS)
    for axis, (title, _), (local, entries) in zip(axes, KINDS, panels, strict=True):
        gap = np.full((SEQ_LEN, 2 if entries.shape[1] else 0), np.nan)
        axis.imshow(np.concatenate([local, gap, entries], axis=1), cmap=colours, vmin=-0.5, vmax=3.5, aspect="auto")
        axis.set_title(title)
        axis.set_xlabel("local keys" + (" | compressed entries" if entries.shape[1] else ""))
        axis.set_xticks([])
        axis.set_yticks([0, SEQ_LEN - 1])
    axes[0].set_ylabel("query token")
    labels = {_LOCAL: "local key seen", _ENTRY: "entry seen", _PASSED_OVER: "entry complete, not selected"}
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in labels]
    figure.legend(handles, labels.values(), loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    target = pathlib.Path(__file__).parent / "figures" / "patterns.png"
    draw(target)
    print(target)
