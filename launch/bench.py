"""Times the attentions of an experiment's sweep: `python launch/bench.py --config=experiments/cpu_attention.py`.

Every point runs alone: forward, backward, then both as one program. Results are appended to
`<run.root>/bench/<experiment>/results.jsonl` as they come, a table is printed and sent to wandb at the end.
Overrides of fields that the sweep sets narrow it, `--config.data.seq_len=8192`; others apply to all points and name the
folder, `--config.bench.repeats=2`. The rule is in `research/sweeps/experiment.py`.
"""

import datetime
import pathlib
import sys

import jax
import rich.box
import rich.console
import rich.progress
import rich.table

from launch import flags
from research.measure import bench
from research.runs import files, tracking
from research.runs.folder import environment, record_start
from research.sweeps import experiment, sweep

# Column, key, unit factor, format.
_NUMBERS = (
    ("run s", "seconds", 1, "{:.4f}"),
    ("± s", "seconds_spread", 1, "{:.4f}"),
    ("lower s", "lower_seconds", 1, "{:.2f}"),
    ("compile s", "compile_seconds", 1, "{:.2f}"),
    ("temp MiB", "temp_bytes", 2**-20, "{:,.1f}"),
    ("GFLOP/s", "useful_flops_per_second", 1e-9, "{:,.1f}"),
)

_PHASES = {"forward": "fwd", "backward": "bwd", "forward_backward": "fwd+bwd"}


def main() -> int:
    """Runs what the command line describes, and returns the exit code."""
    target, common = flags.target(), flags.overrides()
    platform = sweep.detect_platform()
    jax.config.update("jax_platforms", "cpu")  # the accelerator is for the points
    points = bench.plan(target, common, platform)
    console = rich.console.Console(width=None if sys.stdout.isatty() else 150)
    config = flags.config()
    folder = pathlib.Path(config.run.root) / "bench" / sweep.folder_name(target, common)
    folder.mkdir(parents=True, exist_ok=True)
    record_start(folder, environment())

    stamp = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "platform": platform}
    rows, results = [], folder / "results.jsonl"
    files.repair_lines(results)
    with rich.progress.Progress(console=console) as bar:
        task = bar.add_task("", total=len(points))
        for overrides, point, timeout in points:
            bar.update(task, description=experiment.label(overrides))
            for row in bench.run(point, timeout):
                rows.append(stamp | row | {"overrides": overrides})
                files.append_line(results, rows[-1])
            bar.advance(task)
    console.print(_table(rows))
    tracking.send_table(folder, config, "bench", rows)
    module, _ = experiment.load(target)
    for line in getattr(module, "report", lambda rows: [])(rows):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"results: {results}", soft_wrap=True)
    return 0 if all(row["status"] == "ok" for row in rows) else 1


def _table(rows: list[dict]) -> rich.table.Table:
    rates = [row["matmul_flops_per_second"] for row in rows if "matmul_flops_per_second" in row]
    caption = "GFLOP/s of visible pairs" + (f"; products of matrices reach {max(rates) / 1e9:,.0f}" if rates else "")
    table = rich.table.Table("attention", "tokens", "dtype", "phase", box=rich.box.SIMPLE_HEAD, caption=caption)
    for column in table.columns:
        column.no_wrap = True
    for heading, *_ in _NUMBERS:
        table.add_column(heading, justify="right")
    table.add_column("status")
    for row in rows:
        effective = row.get("effective", {})
        blocks = "x".join(str(effective[name]) for name in ("block_q", "block_kv") if name in effective)
        steps = f"dq {effective['dq_reduction_steps']}" if "dq_reduction_steps" in effective else ""
        parts = (row["visibility"], row["backend"], effective.get("schedule", ""), blocks, steps)
        numbers = (form.format(row[key] * factor) if key in row else "" for _, key, factor, form in _NUMBERS)
        what = " ".join(part for part in parts if part)
        table.add_row(what, f"{row['seq_len']:,}", row["dtype"], _PHASES[row["phase"]], *numbers, row["status"])
    return table


if __name__ == "__main__":
    flags.run(main)
