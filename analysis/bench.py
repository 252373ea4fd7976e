"""What was timed as single attentions, as one picture: time, compile time and memory against length."""

import io
import pathlib

import matplotlib.pyplot as plt

from analysis import aot, frame, style

_PANELS = {
    "seconds": ("time, s", 1),
    "compile_seconds": ("compile time, s", 1),
    "temp_bytes": ("temporary memory, MiB", 2**-20),
}


def draw(rows: list[dict], file: pathlib.Path | io.BytesIO) -> None:
    """Writes a PNG of forward and backward together: a line for every setting, crosses where it failed."""
    table = frame.aot_table(rows)
    groups = list(table[table["phase"] == "forward_backward"].groupby("setting", sort=False))
    figure, panels = plt.subplots(1, len(_PANELS), figsize=(17, 5), layout="constrained")
    figure.suptitle("Forward and backward; failures are crosses on the lower edge")
    for panel, (column, (heading, factor)) in zip(panels, _PANELS.items(), strict=True):
        aot.lines(panel, groups, column, heading, factor)
        panel.set_yscale("log")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    style.save(figure, file)
