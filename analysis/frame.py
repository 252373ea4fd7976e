"""Results as pandas frames: a row for everything that was tried, failures too, named by the settings in effect."""

from typing import Any

import pandas as pd


def of_aot(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows of `launch/aot.py`, with `setting`, what took effect, and `useful_fraction` of the scheduled FLOPs."""
    table = pd.json_normalize([{**row, "effective": row.get("effective", {})} for row in rows])
    for column in (
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


def setting(row: dict[str, Any]) -> str:
    """A row's program and what took effect, or where nothing did, what was asked: `op hca closed_form 512x512 dq 3`."""
    effective = row.get("effective", {})
    backend = effective.get("backend", row["backend"])
    parts = [row["what"], row["visibility"], backend if backend != "splash" else "", row["schedule"]]
    if "block_q" in effective:
        parts.append("x".join(str(effective[name]) for name in ("block_q", "block_kv") if name in effective))
    if "block_q_dkv" in effective:
        backward = f"{effective['block_q_dkv']}x{effective['block_kv_dkv']}"
        parts += [] if backward == parts[-1] else [f"bwd {backward}"]
        parts.append(f"dq {effective['dq_reduction_steps']}")
    for name, heading in (("heads_per_call", "heads"), ("heads_at_once", "heads")):
        if effective.get(name):
            parts.append(f"{heading} {effective[name]}")
    return " ".join(part for part in parts if part)
