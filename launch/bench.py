"""Times the attentions of an experiment's sweep: `python launch/bench.py --config=experiments/cpu_attention.py`.

Every point runs alone: forward, backward, then both as one program. Rows are appended to
`<run.root>/bench/<experiment>/results.jsonl` as they come; what stands there, measured by the same versions on the same
platform, is not measured again unless `--fresh`. A table is printed and sent to wandb at the end.
Overrides of fields that the sweep sets narrow it, `--config.data.seq_len=8192`; others apply to all points and name the
folder, `--config.bench.repeats=2`. The rule is in `research/sweeps/experiment.py`.
"""

import rich.table

from launch import flags, measuring

flags.define_config()
measuring.define_fresh()

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
    import jax

    from research.measure import pipeline
    from research.sweeps import sweep

    platform = sweep.detect_platform()
    jax.config.update("jax_platforms", "cpu")  # the accelerator is for the points
    planned = pipeline.plan("bench", flags.target(), flags.overrides(), platform)
    console, settings = measuring.console(), flags.common_settings()
    folder = measuring.folder(settings.run.root, "bench", measuring.sweep_folder())
    measured = measuring.measure(planned, folder / measuring.RESULTS, {"platform": platform}, console)
    console.print(_table(measured.rows))
    measuring.conclude("bench", measured, folder, settings, console)
    return measuring.end(measured, folder, console, all_ok=True)


def _table(rows: list[dict]) -> rich.table.Table:
    rates = [row["matmul_flops_per_second"] for row in rows if "matmul_flops_per_second" in row]
    caption = "GFLOP/s of visible pairs" + (f"; products of matrices reach {max(rates) / 1e9:,.0f}" if rates else "")
    headings = tuple(heading for heading, *_ in _NUMBERS)
    table = measuring.table("attention", "tokens", "dtype", "phase", caption=caption, numbers=headings)
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
