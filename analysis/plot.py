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

_SEEN = 0.01  # share of the curves' height below which a difference cannot be seen


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
    bars = 1 + 0.32 * (len(rows) + len(groups)) if headline else 0
    figure = plt.figure(figsize=(14, 4 + bars), layout="constrained")
    fields = table.fields([_bare(row) for row in rows])
    told = [title] + ([f"a point is named by its {fields}"] if len(rows) > 1 and fields else [])
    told += ["colours and marks are those of the bars below"] if headline else []
    figure.suptitle("\n".join(told), fontsize="medium")
    grid = figure.add_gridspec(2 if headline else 1, columns, height_ratios=(4, bars) if headline else None)
    strategies = list(dict.fromkeys(_strategy(row) for row in rows))
    looks = {
        pattern: [style.line(strategies.index(_strategy(row))) for row in group] for pattern, group in groups.items()
    }
    _curves(figure, grid, columns // len(groups), groups, looks, named=not headline)
    if headline:
        _bars(figure, grid, columns // len(headline), groups, looks, headline)
    style.save(figure, file)


def _strategy(row: Row) -> str:
    """What points of one colour share: backend and schedule; where a point sets neither, all it sets but its layers."""
    found = (row["overrides"].get(f"attention.{name}") for name in ("backend", "schedule", "csa_schedule"))
    return " ".join(filter(None, found)) or _name(row).removeprefix("+".join(row["layers"]))


def _name(row: Row) -> str:
    """A point by what it sets beside its layers, if it sets anything else."""
    return table.name(_bare(row)) if _bare(row)["overrides"] else table.name(row)


def _bare(row: Row) -> Row:
    """The point without its layers, which the panels tell."""
    return row | {"overrides": {name: x for name, x in row["overrides"].items() if name != "model.layers"}}


def _curves(
    figure: matplotlib.figure.Figure,
    grid: Any,
    span: int,
    groups: dict[str, list[Row]],
    looks: dict[str, list[dict[str, str]]],
    named: bool,
) -> None:
    shared = None
    for index, (pattern, rows) in enumerate(groups.items()):
        axes = figure.add_subplot(grid[0, index * span : (index + 1) * span], sharey=shared)
        shared = shared or axes
        curves = []
        for number, (row, look) in enumerate(zip(rows, looks[pattern], strict=True)):
            metrics = row["metrics"] if "metrics" in row else read_rows(pathlib.Path(row["folder"]))
            losses = {entry["step"]: entry["loss"] for entry in metrics if "loss" in entry}
            curves += [losses] if losses else []
            # Curves that agree lie on one another: the later, the thinner, with marks at other steps.
            axes.plot(
                list(losses),
                list(losses.values()),
                style.DASHES[number % len(style.DASHES)],
                linewidth=min(5.0, 0.8 + 0.6 * (len(rows) - number)),
                markersize=4,
                markevery=(number % max(1, len(losses)), max(1, len(rows))),
                label=_name(row),
                **look,
            )
            validated = [entry for entry in metrics if "val_loss" in entry]
            axes.plot(
                [entry["step"] for entry in validated],
                [entry["val_loss"] for entry in validated],
                linestyle="",
                markersize=8,
                markerfacecolor="none",
                **look,
            )
        axes.set_title(pattern)
        axes.set_xlabel("step")
        if index == 0:
            axes.set_ylabel("loss, nats (hollow: validation)")
        axes.grid(alpha=0.3)
        if told := _agreement(curves):
            axes.text(0.97, 0.97, told, transform=axes.transAxes, ha="right", va="top", fontsize="small")
        if named:
            axes.legend(fontsize="small", handlelength=3)


def _agreement(curves: list[dict[int, float]]) -> str:
    """How far curves are apart at their common steps, where that is too little to be seen."""
    steps = set.intersection(*map(set, curves)) if len(curves) > 1 else set()
    if not steps:
        return ""
    values = [[curve[step] for curve in curves] for step in steps]
    apart, height = max(max(v) - min(v) for v in values), max(map(max, values)) - min(map(min, values))
    return f"{len(curves)} curves, at most {apart:.1g} nats apart" if apart < _SEEN * height else ""


def _bars(
    figure: matplotlib.figure.Figure,
    grid: Any,
    span: int,
    groups: dict[str, list[Row]],
    looks: dict[str, list[dict[str, str]]],
    headline: tuple[str, ...],
) -> None:
    rows = [row for group in groups.values() for row in group]
    marks = [look for group in looks.values() for look in group]
    heads, places = {}, []  # of the patterns, above their bars, and of the bars
    for pattern, group in groups.items():
        heads[pattern] = len(heads) * 1.4 + len(places)
        places += [heads[pattern] + 1 + number for number in range(len(group))]
    for column, metric in enumerate(headline):
        axes = figure.add_subplot(grid[1, column * span : (column + 1) * span])
        heading, factor = TITLES[metric]
        values = [row.get(metric, 0.0) * factor for row in rows]
        axes.barh(places, values, color=[look["color"] for look in marks])
        for place, row, value, look in zip(places, rows, values, marks, strict=True):
            axes.plot(value, place, markersize=5, markeredgecolor="white", **look)  # the mark of its curve
            text = f"  {value:.3g}" if metric in row else f"  {row['status']}"
            axes.text(value, place, text, va="center", fontsize="small")
        labels = [*heads, *map(_name, rows)] if column == 0 else []
        axes.set_yticks([*heads.values(), *places], labels or [""] * (len(heads) + len(places)), fontsize="small")
        for label in axes.get_yticklabels()[: len(heads)]:
            label.set_fontweight("bold")
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.15)
        axes.set_xlim(left=0)
        axes.set_ylim(places[-1] + 0.7, -0.7)
        axes.set_title(heading)
        axes.grid(axis="x", alpha=0.3)
