"""A picture of the blocks that a schedule visits."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np

from research.measure import masks

_COLOURS = ("#F2F2F2", "#E69F00", "#0072B2")  # empty, partial, full


def draw(request: masks.Request, path: pathlib.Path) -> None:
    """Writes a PNG: rows are blocks of queries, columns blocks of keys, the compressed ones right of the line."""
    kinds, local_blocks = masks.block_grid(request)
    figure, axes = plt.subplots(figsize=(8, 7), layout="constrained")
    colours = matplotlib.colors.ListedColormap(_COLOURS)
    axes.imshow(kinds, cmap=colours, vmin=-0.5, vmax=2.5, aspect="auto", interpolation="nearest")
    axes.axvline(local_blocks - 0.5, color="black", linewidth=1)
    axes.set_xlabel(f"blocks of {request.block_kv} keys: local | compressed")
    axes.set_ylabel(f"blocks of {request.block_q} queries")
    counts = np.bincount(kinds.reshape(-1), minlength=3)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS]
    labels = [f"{count:,} {name}" for count, name in zip(counts, ("empty", "partial", "full"), strict=True)]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    axes.set_title(f"{request.visibility.kind}, {request.schedule}, {request.seq_len:,} tokens")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
