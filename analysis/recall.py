"""Accuracy against distance: `python analysis/recall.py runs/recall-demo/results.jsonl`."""

import io
import pathlib
import sys

import matplotlib.pyplot as plt

from analysis import style
from research.data.recall import CHANCE
from research.runs import files
from research.sweeps.experiment import Row
from research.training import accuracy


def trained(rows: list[Row]) -> list[Row]:
    """The rows of models that learned to the end; those that compare mask strategies did not."""
    return [row for row in rows if row["status"] == "ok" and "attention.backend" not in row["overrides"]]


def draw(rows: list[Row], file: pathlib.Path | io.BytesIO) -> None:
    """Writes a PNG: a panel per task, and in it a curve per pattern over the ranges of distances.

    Args:
      rows: of a sweep of `experiments/recall.py`; those that failed, or compare mask strategies, are left out.
      file: gets the PNG.
    """
    tasks: dict[str, list[Row]] = {}
    for row in trained(rows):
        tasks.setdefault(row["overrides"].get("data.task", "needle"), []).append(row)
    names = list(dict.fromkeys(name(row) for group in tasks.values() for row in group))
    figure, axes = plt.subplots(1, len(tasks), figsize=(11, 4.2), layout="constrained", sharey=True, squeeze=False)
    for axis, (task, group) in zip(axes[0], tasks.items(), strict=True):
        for row in group:
            shares, label = accuracy.shares(row), name(row)
            axis.plot(range(len(shares)), list(shares.values()), label=label, **style.line(names.index(label)))
        axis.axhline(CHANCE, color="black", linestyle=":", linewidth=1, label="a guess")
        axis.set_xticks(range(len(shares)), [f"{first} to {last}" for first, last in shares])
        axis.set_xlabel("distance from the value to the question, tokens")
        axis.set_title(task)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylim(0, 1.03)
    axes[0, 0].set_ylabel("share of right answers")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    style.save(figure, file)


def name(row: Row) -> str:
    """What a curve is called: the pattern of layers, and what is unusual about it."""
    layers, overrides = "+".join(row["layers"]), row["overrides"]
    if "attention.window" in overrides:
        return f"full attention (window {overrides['attention.window']})"
    return f"{layers}, all entries" if "attention.top_k" in overrides else layers


if __name__ == "__main__":
    source = pathlib.Path(sys.argv[1])
    target = source.with_name("accuracy.png")
    draw(files.read_lines(source), target)
    print(target)
