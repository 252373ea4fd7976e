"""What was compiled ahead of time, as one picture: memory and compile time against length, and the Pareto front."""

import io
import pathlib

import matplotlib.pyplot as plt
import pandas as pd

from analysis import frame, style

Groups = list[tuple[str, pd.DataFrame]]  # rows by setting

_PANELS = {
    "peak_bytes": ("peak memory, GiB", 2**-30),
    "compile_seconds": ("compile time, s", 1),
    "useful_fraction": ("useful share of the scheduled FLOPs", 1),
}


def draw(rows: list[dict], file: pathlib.Path | io.BytesIO) -> None:
    """Writes a PNG of forward and backward together: a line for every program and schedule, crosses where it failed."""
    table = frame.aot_table(rows)
    table = table[table["phase"].isin(["forward_backward", "update"])]
    figure, axes = plt.subplots(2, 2, figsize=(17, 10), layout="constrained")
    figure.suptitle("Forward and backward, compiled ahead of time; failures are crosses on the lower edge")
    groups = list(table.groupby("setting", sort=False))
    for panel, (column, (heading, factor)) in zip(axes.flat, _PANELS.items(), strict=False):
        lines(panel, groups, column, heading, factor)
        if column != "useful_fraction":
            panel.set_yscale("log")
    _front(axes.flat[-1], groups)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right upper", fontsize="x-small")
    style.save(figure, file)


def lines(panel: plt.Axes, groups: Groups, column: str, heading: str, factor: float) -> None:
    """Draws a column against length, a line for each of the groups of `frame.aot_table` by setting."""
    panel.set_xscale("log", base=2)
    for number, (name, group) in enumerate(groups):
        look = style.line(number)
        fits = group[group["status"] == "ok"].sort_values("seq_len")
        panel.plot(fits["seq_len"], fits[column] * factor, label=name, markersize=4, linewidth=1, **look)
        failed = group[group["status"] != "ok"]
        low = [0.02] * len(failed)
        panel.plot(failed["seq_len"], low, "x", color=look["color"], transform=panel.get_xaxis_transform())
    panel.set(xlabel="tokens", ylabel=heading)
    panel.grid(alpha=0.3)


def _front(panel: plt.Axes, groups: Groups) -> None:
    """Peak memory against the roofline, the longest length that fits of every setting."""
    for number, (_, group) in enumerate(groups):
        fits = group[group["status"] == "ok"]
        if len(fits):
            panel.plot(
                fits["roofline_seconds"] * 1e3,
                fits["peak_bytes"] * 2**-30,
                linestyle="",
                markersize=4,
                **style.line(number),
            )
    panel.set(xscale="log", yscale="log", xlabel="roofline (a model), ms", ylabel="peak memory, GiB")
    panel.grid(alpha=0.3)
