"""A sweep's rows as a table."""

from typing import Any

import rich.box
import rich.table

from research.sweeps.experiment import Row

_MIB = 2**20
# Of the summary: column, unit factor, format.
_NUMBERS = {
    "final_loss": ("loss", 1, "{:.4f}"),
    "val_bits_per_byte": ("val\nbits/byte", 1, "{:.3f}"),
    "lower_seconds": ("lower\ns", 1, "{:.2f}"),
    "compile_seconds": ("compile\ns", 1, "{:.2f}"),
    "step_seconds": ("step\ns", 1, "{:.3f}"),
    "temp_bytes": ("temp\nMiB", 1 / _MIB, "{:,.1f}"),
}
_RIGHT = tuple(heading for heading, *_ in _NUMBERS.values())


def build(rows: list[Row]) -> rich.table.Table:
    """The table of `cells` for the terminal."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for heading in headings(rows):
        table.add_column(heading, justify="right" if heading in _RIGHT else "left")
    for line in cells(rows):
        table.add_row(*line)
    return table


def headings(rows: list[Row]) -> list[str]:
    """Of the columns of `cells`."""
    return ["#", f"point:\n{fields(rows)}", "in effect", *_RIGHT, "status"]


def cells(rows: list[Row]) -> list[list[str]]:
    """One line per point: settings asked for, settings in effect, losses, costs, and how it ended."""
    return [[str(n), name(row), in_effect(row), *_numbers(row), row["status"]] for n, row in enumerate(rows, 1)]


def _numbers(row: Row) -> list[str]:
    return [form.format(row[name] * factor) if name in row else "" for name, (_, factor, form) in _NUMBERS.items()]


def name(row: Row) -> str:
    """A point by the values it sets, `hca splash static 128 128 3`, or where those are not known by its label."""
    values = row["overrides"].values()
    told = " ".join("+".join(value) if isinstance(value, list | tuple) else str(value) for value in values)
    return told or row["point"]


def fields(rows: list[Row]) -> str:
    """What the values in the names of the points belong to: `layers backend schedule block_q`."""
    longest = max((row["overrides"] for row in rows), key=len)
    return " ".join(field.rpartition(".")[2] for field in longest)


def in_effect(row: Row) -> str:
    """What the backend made of the request: `splash static 128x128 dq 3`, once per kind of layer where they differ."""
    by_kind = {kind: _brief(settings) for kind, settings in row.get("effective", {}).items()}
    if len(set(by_kind.values())) <= 1:
        return next(iter(by_kind.values()), "")
    return "\n".join(f"{kind}: {text}" for kind, text in by_kind.items())


def _brief(settings: dict[str, Any]) -> str:
    def blocks(*names: str) -> str:
        return "x".join(str(settings[name]) for name in names if name in settings)

    forward, backward = blocks("block_q", "block_kv"), blocks("block_q_dkv", "block_kv_dkv")
    parts = [settings["backend"], settings.get("schedule", ""), forward]
    if backward and backward != forward:
        parts.append(f"backward {backward}")
    if "dq_reduction_steps" in settings:
        parts.append(f"dq {settings['dq_reduction_steps']}")
    return " ".join(part for part in parts if part)
