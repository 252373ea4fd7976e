"""The stages of CSA's training as one picture: losses above, what the indexer selects below, one step axis for all."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# A row of metrics: what is drawn of it, and in which panel.
_PANELS = (
    ("nats", (("loss", "language model, training"), ("val_loss", "language model, validation"))),
    ("nats", (("indexer_kl", "indexer, training"), ("val_indexer_kl", "indexer, validation"))),
    (
        "share",
        (
            ("val_indexer_recall", "recall of the most attended entries"),
            ("val_indexer_coverage", "attention covered by the selected"),
            ("val_indexer_useful", "recall of a random choice"),
        ),
    ),
)
_COLOURS = ("#0072B2", "#D55E00", "#009E73")  # told apart by colour-blind readers too


def draw(stages: dict[str, list[dict[str, float]]], path: pathlib.Path) -> None:
    """Writes the picture.

    Args:
      stages: the rows of each stage's `metrics.jsonl`, in the order in which they followed each other.
      path: a PNG file.
    """
    figure, panels = plt.subplots(len(_PANELS), 1, figsize=(9, 9), sharex=True, layout="constrained")
    start = 0
    for stage, rows in stages.items():
        for axes, (unit, curves) in zip(panels, _PANELS, strict=True):
            for (name, label), colour in zip(curves, _COLOURS, strict=False):
                points = [(start + row["step"], row[name]) for row in rows if name in row]
                if points:
                    marker = "o-" if name.startswith("val_") else "-"
                    axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=3, label=label)
            axes.axvline(start, color="grey", linewidth=0.8)
            axes.set_ylabel(unit)
        panels[0].annotate(
            stage, (start, 1.0), xycoords=("data", "axes fraction"), xytext=(3, 3), textcoords="offset points"
        )
        start += rows[-1]["step"]
    for axes in panels:
        axes.grid(alpha=0.3)
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # a curve once, not per stage
        axes.legend(handles.values(), handles.keys(), fontsize="small")
    panels[-1].set_xlabel("step")
    figure.savefig(path, dpi=110)
    plt.close(figure)
