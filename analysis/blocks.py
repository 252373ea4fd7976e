"""A picture of the blocks that schedules visit."""

import io
import math
import pathlib

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np

from analysis import style
from research.measure import masks
from research.measure.program import Program

_KINDS = {"empty": style.EMPTY, "partial": style.COLOURS[1], "full": style.COLOURS[0]}


def draw(programs: list[Program], file: pathlib.Path | io.BytesIO) -> None:
    """Writes a PNG, two panels a row: blocks of queries down, blocks of keys across, compressed right of the line."""
    columns = min(len(programs), 2)
    rows = math.ceil(len(programs) / columns)
    figure = plt.figure(figsize=(1 + 6.5 * columns, 0.5 + 5 * rows), layout="constrained")
    for number, program in enumerate(programs, 1):
        axes = figure.add_subplot(rows, columns, number)
        kinds, local_blocks, effective = masks.block_grid(program)
        (kind,) = program.settings.model.layers
        colours = matplotlib.colors.ListedColormap(list(_KINDS.values()))
        axes.imshow(kinds, cmap=colours, vmin=-0.5, vmax=2.5, aspect="auto", interpolation="nearest")
        axes.locator_params(integer=True)
        entries = local_blocks < kinds.shape[1]
        if entries:
            axes.axvline(local_blocks - 0.5, color="black", linewidth=1)
        axes.set_ylabel(f"blocks of {effective['block_q']} queries")
        counts = np.bincount(kinds.reshape(-1), minlength=3)
        told = ", ".join(f"{count:,} {name}" for count, name in zip(counts, _KINDS, strict=True))
        axes.set_xlabel(f"blocks of {effective['block_kv']} keys: local{' | compressed' if entries else ''}\n{told}")
        axes.set_title(f"{kind}, {effective['schedule']}, {program.settings.data.seq_len:,} tokens")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in _KINDS.values()]
    figure.legend(handles, _KINDS, loc="outside lower center", ncols=3, frameon=False)
    style.save(figure, file)
