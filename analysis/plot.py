"""A sweep as one picture: loss curves by attention pattern above, what each point costs below."""

import math
import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.figure
import matplotlib.pyplot as plt

from analysis import table
from research import tracking
from research.experiment import Row

# Okabe and Ito's colours, told apart by colour-blind readers too.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")

# Of the summary: title and unit factor of its bars.
TITLES = {
    "seconds": ("time, s", 1),
    "step_seconds": ("step time, s", 1),
    "lower_seconds": ("lowering time, s", 1),
    "compile_seconds": ("compile time, s", 1),
    "temp_bytes": ("temporary memory, MiB", 2**-20),
    "final_loss": ("training loss, nats", 1),
    "val_accuracy": ("share of right answers", 1),
    "val_loss": ("validation loss, nats", 1),
    "val_bits_per_byte": ("validation, bits per byte", 1),
    "tokens_per_second": ("tokens/s", 1),
}


def draw(rows: list[Row], headline: tuple[str, ...], title: str, path: pathlib.Path) -> None:
    """Writes the picture.

    Args:
      rows: `results.jsonl` of a sweep; points that failed keep their place among the bars, with their status.
      headline: numbers of the summary to draw bars of, a panel each.
      title: the picture's.
      path: a PNG file.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault("+".join(row["layers"]), []).append(row)
    columns = math.lcm(len(groups), len(headline))
    figure = plt.figure(figsize=(14, 5 + 0.32 * len(rows)), layout="constrained")
    figure.suptitle(f"{title}\na point is named by its {table.fields(rows)}", fontsize="medium")
    grid = figure.add_gridspec(2, columns, height_ratios=(4, 1 + 0.32 * len(rows)))
    _curves(figure, grid, columns // len(groups), groups)
    _bars(figure, grid, columns // len(headline), groups, headline)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curves(figure: matplotlib.figure.Figure, grid: Any, span: int, groups: dict[str, list[Row]]) -> None:
    shared = None
    for index, (pattern, rows) in enumerate(groups.items()):
        axes = figure.add_subplot(grid[0, index * span : (index + 1) * span], sharey=shared)
        shared = shared or axes
        for number, row in enumerate(rows):
            entries = [entry for entry in tracking.read_rows(pathlib.Path(row["folder"])) if "loss" in entry]
            # Curves that agree lie on one another: the later, the thinner, so that all stay visible.
            axes.plot(
                [entry["step"] for entry in entries],
                [entry["loss"] for entry in entries],
                _DASHES[number % len(_DASHES)],
                color=_COLOURS[number % len(_COLOURS)],
                linewidth=min(5.0, 0.8 + 0.6 * (len(rows) - number)),
                label=table.name(row).removeprefix(f"{pattern} "),
            )
        axes.set_title(pattern)
        axes.set_xlabel("step")
        if index == 0:
            axes.set_ylabel("training loss, nats")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", handlelength=3)


def _bars(
    figure: matplotlib.figure.Figure, grid: Any, span: int, groups: dict[str, list[Row]], headline: tuple[str, ...]
) -> None:
    rows = [(index, row) for index, group in enumerate(groups.values()) for row in group]
    colours = [_COLOURS[number % len(_COLOURS)] for group in groups.values() for number in range(len(group))]
    places = [place + 0.6 * index for place, (index, _) in enumerate(rows)]  # a gap between groups
    for column, metric in enumerate(headline):
        axes = figure.add_subplot(grid[1, column * span : (column + 1) * span])
        heading, factor = TITLES[metric]
        values = [row.get(metric, 0.0) * factor for _, row in rows]
        axes.barh(places, values, color=colours)
        for place, (_, row), value in zip(places, rows, values, strict=True):
            text = f" {value:.3g}" if metric in row else f" {row['status']}"
            axes.text(value, place, text, va="center", fontsize="x-small")
        labels = [table.name(row) if column == 0 else "" for _, row in rows]
        axes.set_yticks(places, labels, fontsize="small")
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_title(heading)
        axes.grid(axis="x", alpha=0.3)
