"""What was compiled for GPUs, as one picture: launches and temporaries of each way to compute attention, by length."""

import io
import pathlib

import matplotlib.pyplot as plt

from analysis import style

Row = dict
_PANELS = (("kernels", "launches", 1), ("temp_bytes", "temporary memory, MB", 1e-6))
_WIDTH = 64  # of the heads that are drawn


def way(row: Row) -> str:
    """Backend and kernel, and of CSA how the chosen entries are come by."""
    effective = row.get("effective") or {}
    name = f"joined, {effective['flash_kernel']}" if "flash_kernel" in effective else row["backend"]
    return f"{name}, {effective['schedule']}" if effective.get("schedule") and row["visibility"] == "csa" else name


def drawn(rows: list[Row]) -> list[Row]:
    """Forward and backward of default blocks, compiled, the cross of splash left out."""
    return [
        row
        for row in rows
        if row["status"] == "ok"
        and row["phase"] == "forward_backward"
        and row["requested"]["block_q"] == 0
        and row["head_width"] == _WIDTH
    ]


def draw(rows: list[Row], file: pathlib.Path | io.BytesIO) -> None:
    """Writes a PNG: a column for every chip and kind, above the launches and below the temporaries, log scales."""
    rows = drawn(rows)
    columns = list(dict.fromkeys((row["chip"], row["visibility"]) for row in rows))
    names = sorted({way(row) for row in rows})
    figure, axes = plt.subplots(
        len(_PANELS), len(columns), figsize=(3.2 * len(columns), 7), sharex=True, sharey="row", layout="constrained"
    )
    figure.suptitle("Forward and backward, 8 heads of 64, bfloat16: compiled for GPUs that were not there")
    for place, (chip, kind) in enumerate(columns):
        for panel, (field, heading, factor) in zip(axes[:, place], _PANELS, strict=True):
            for number, name in enumerate(names):
                found = [row for row in rows if (row["chip"], row["visibility"], way(row)) == (chip, kind, name)]
                points = sorted({row["seq_len"]: row[field] * factor for row in found}.items())
                panel.plot(*zip(*points, strict=True) if points else ([], []), label=name, **style.line(number))
            panel.set(xscale="log", yscale="log")
            panel.margins(x=0.15)
            panel.grid(alpha=0.3)
            if not place:
                panel.set_ylabel(heading)
        axes[0, place].set_title(f"{kind}, {chip}")
        axes[-1, place].set(xlabel="tokens")
        lengths = sorted({row["seq_len"] for row in rows})
        axes[-1, place].set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes[-1, place].minorticks_off()
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    style.save(figure, file)
