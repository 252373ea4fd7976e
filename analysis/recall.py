"""Accuracy against distance: `python analysis/recall.py runs/recall-runlocal/results.jsonl`."""

import json
import math
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from analysis import table
from research.data.recall import CHANCE
from research.experiment import Row
from research.training import accuracy

# Okabe and Ito's colours, and a marker each for those who print.
_STYLES = (("#0072B2", "o"), ("#E69F00", "s"), ("#009E73", "^"), ("#D55E00", "D"), ("#CC79A7", "v"), ("#56B4E9", "P"))


def draw(rows: list[Row], path: pathlib.Path) -> None:
    """Writes a PNG: a curve per point that was trained in full, over the ranges of distances.

    Args:
      rows: of a sweep of `experiments/recall.py`; those that failed, or ran for a few steps only, are left out.
      path: the file.
    """
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    trained = [row for row in rows if accuracy.shares(row) and "train.steps" not in row["overrides"]]
    for row, (colour, marker) in zip(trained, _STYLES, strict=False):
        shares = accuracy.shares(row)
        middles = [math.sqrt(first * last) for first, last in shares]
        axes.plot(middles, list(shares.values()), color=colour, marker=marker, label=table.name(row))
    ticks = list(accuracy.shares(trained[0]))
    axes.set_xscale("log", base=2)
    axes.set_xticks([math.sqrt(a * z) for a, z in ticks], [f"{a} to {z}" for a, z in ticks])
    axes.axhline(CHANCE, color="black", linestyle=":", linewidth=1, label="chance")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("distance from the value to the question, tokens")
    axes.set_ylabel("share of right answers")
    axes.grid(alpha=0.3)
    axes.legend(title=table.fields(trained), fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    source = pathlib.Path(sys.argv[1])
    target = source.with_name("accuracy.png")
    draw([json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()], target)
    print(target)
