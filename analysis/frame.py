"""Results as pandas frames: a row for everything that was tried, failures too, named by the settings in effect."""

from typing import Any

import pandas as pd

# Heading, unit factor, format.
_NUMBERS = {
    "seconds": ("run\ns", 1, "{:.4f}"),
    "seconds_spread": ("±\ns", 1, "{:.4f}"),
    "schedule_seconds": ("schedule\ns", 1, "{:.2f}"),
    "lower_seconds": ("lower\ns", 1, "{:.2f}"),
    "compile_seconds": ("compile\ns", 1, "{:.2f}"),
    "temp_bytes": ("temp\nMiB", 2**-20, "{:,.1f}"),
    "peak_bytes": ("peak\nMiB", 2**-20, "{:,.1f}"),
    "useful_flops_per_second": ("useful\nGFLOP/s", 1e-9, "{:,.1f}"),
    "roofline_seconds": ("roofline\nms", 1e3, "{:,.1f}"),
}


def aot_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows of `launch/aot.py` or `bench.py`: `setting`, what took effect; `useful_fraction` of the scheduled FLOPs."""
    table = pd.json_normalize([{**row, "effective": row.get("effective", {})} for row in rows])
    for column in (
        "seconds",
        "peak_bytes",
        "temp_bytes",
        "compile_seconds",
        "roofline_seconds",
        "useful_flops",
        "scheduled_flops",
    ):
        if column not in table:
            table[column] = float("nan")
    table["useful_fraction"] = table["useful_flops"] / table["scheduled_flops"]
    table["setting"] = [setting(row) for row in rows]
    return table


def cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of a table of the same rows, without the numbers that none of them has."""
    numbers = {name: form for name, form in _NUMBERS.items() if any(name in row for row in rows)}
    lines = [
        [
            setting(row),
            f"{row['seq_len']:,}",
            row["dtype"],
            row["phase"].replace("_", "+"),
            *(form.format(row[name] * factor) if name in row else "" for name, (_, factor, form) in numbers.items()),
            row["date"][:10],
            row["status"],
        ]
        for row in rows
    ]
    return [
        "setting",
        "tokens",
        "dtype",
        "phase",
        *(heading for heading, *_ in numbers.values()),
        "date",
        "status",
    ], lines


def setting(row: dict[str, Any]) -> str:
    """A row's program and what took effect, or where nothing did, what was asked: `op hca closed_form 512x512 dq 3`."""
    effective = row.get("effective", {})
    backend = effective.get("backend", row["backend"])
    schedule = row.get("schedule", "")
    parts = [row.get("what", ""), row["visibility"], backend if backend != "splash" or not schedule else "", schedule]
    if "block_q" in effective:
        parts.append("x".join(str(effective[name]) for name in ("block_q", "block_kv") if name in effective))
    if "block_q_dkv" in effective:
        backward = f"{effective['block_q_dkv']}x{effective['block_kv_dkv']}"
        parts += [] if backward == parts[-1] else [f"bwd {backward}"]
        parts.append(f"dq {effective['dq_reduction_steps']}")
    for some in (heads_per_call(row), effective.get("heads_at_once")):
        if some:
            parts.append(f"heads {some}")
    return " ".join(part for part in parts if part)


def heads_per_call(row: dict[str, Any]) -> int:
    """Heads that a call of the kernel serves, 0 for all of them, which older rows recorded as 0 themselves."""
    found = row.get("effective", {}).get("heads_per_call", 0)
    return 0 if found == row.get("heads") else found
