"""The stages of CSA's training as one picture: losses above, what the indexer selects below, one step axis for all."""

import io
import pathlib

import matplotlib.pyplot as plt

from analysis import style

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


def draw(stages: dict[str, list[dict[str, float]]], file: pathlib.Path | io.BytesIO) -> None:
    """Writes the picture.

    Args:
      stages: the rows of each stage's `metrics.jsonl`, in the order in which they followed each other.
      file: gets the PNG.
    """
    figure, panels = plt.subplots(len(_PANELS), 1, figsize=(9, 9), sharex=True, layout="constrained")
    start = 0
    for stage, rows in stages.items():
        for axes, (unit, curves) in zip(panels, _PANELS, strict=True):
            for number, (name, label) in enumerate(curves):
                points = [(start + row["step"], row[name]) for row in rows if name in row]
                if points:
                    look = style.line(number) | ({} if name.startswith("val_") else {"marker": ""})
                    axes.plot(*zip(*points, strict=True), markersize=3, label=label, **look)
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
    style.save(figure, file)
