"""A sweep as one picture: loss curves by attention pattern above, what each point costs below."""

import io
import math
import pathlib
from typing import Any

import matplotlib.figure
import matplotlib.pyplot as plt

from analysis import style, table
from research.runs.folder import read_rows
from research.sweeps.experiment import Row

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


def draw(rows: list[Row], headline: tuple[str, ...], title: str, file: pathlib.Path | io.BytesIO) -> None:
    """Writes the picture.

    Args:
      rows: `results.jsonl` of a sweep, with `metrics` or the `folder` that holds them; points that failed keep their
        place among the bars, with their status.
      headline: numbers of the summary to draw bars of, a panel each; none leaves the curves alone.
      title: the picture's.
      file: gets the PNG.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault("+".join(row["layers"]), []).append(row)
    columns = math.lcm(len(groups), len(headline) or 1)
    bars = 1 + 0.32 * len(rows) if headline else 0
    figure = plt.figure(figsize=(14, 4 + bars), layout="constrained")
    named = f"\na point is named by its {table.fields(rows)}" if len(rows) > 1 else ""
    figure.suptitle(f"{title}{named}", fontsize="medium")
    grid = figure.add_gridspec(2 if headline else 1, columns, height_ratios=(4, bars) if headline else None)
    _curves(figure, grid, columns // len(groups), groups)
    if headline:
        _bars(figure, grid, columns // len(headline), groups, headline)
    style.save(figure, file)


def _curves(figure: matplotlib.figure.Figure, grid: Any, span: int, groups: dict[str, list[Row]]) -> None:
    shared = None
    for index, (pattern, rows) in enumerate(groups.items()):
        axes = figure.add_subplot(grid[0, index * span : (index + 1) * span], sharey=shared)
        shared = shared or axes
        for number, row in enumerate(rows):
            metrics = row["metrics"] if "metrics" in row else read_rows(pathlib.Path(row["folder"]))
            entries = [entry for entry in metrics if "loss" in entry]
            # Curves that agree lie on one another: the later, the thinner, with marks at other steps.
            axes.plot(
                [entry["step"] for entry in entries],
                [entry["loss"] for entry in entries],
                style.DASHES[number % len(style.DASHES)],
                linewidth=min(5.0, 0.8 + 0.6 * (len(rows) - number)),
                markersize=4,
                markevery=(number % max(1, len(entries)), max(1, len(rows))),
                label=table.name(row).removeprefix(f"{pattern} "),
                **style.line(number),
            )
            validated = [entry for entry in metrics if "val_loss" in entry]
            axes.plot(
                [entry["step"] for entry in validated],
                [entry["val_loss"] for entry in validated],
                linestyle="",
                markersize=8,
                markerfacecolor="none",
                **style.line(number),
            )
        axes.set_title(pattern)
        axes.set_xlabel("step")
        if index == 0:
            axes.set_ylabel("loss, nats (hollow: validation)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", handlelength=3)


def _bars(
    figure: matplotlib.figure.Figure, grid: Any, span: int, groups: dict[str, list[Row]], headline: tuple[str, ...]
) -> None:
    rows = [(index, row) for index, group in enumerate(groups.values()) for row in group]
    looks = [style.line(number) for group in groups.values() for number in range(len(group))]
    places = [place + 0.6 * index for place, (index, _) in enumerate(rows)]  # a gap between groups
    for column, metric in enumerate(headline):
        axes = figure.add_subplot(grid[1, column * span : (column + 1) * span])
        heading, factor = TITLES[metric]
        values = [row.get(metric, 0.0) * factor for _, row in rows]
        axes.barh(places, values, color=[look["color"] for look in looks])
        for place, (_, row), value, look in zip(places, rows, values, looks, strict=True):
            axes.plot(value, place, markersize=5, markeredgecolor="white", **look)  # the mark of its curve
            text = f"  {value:.3g}" if metric in row else f"  {row['status']}"
            axes.text(value, place, text, va="center", fontsize="x-small")
        labels = [table.name(row) if column == 0 else "" for _, row in rows]
        axes.set_yticks(places, labels, fontsize="small")
        axes.margins(x=0.15, y=0.01)
        axes.set_xlim(left=0)
        axes.invert_yaxis()
        axes.set_title(heading)
        axes.grid(axis="x", alpha=0.3)
