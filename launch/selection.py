"""What choosing CSA's entries costs, scores included: `python launch/selection.py --lengths=4096,8192,16384`.

The usual one-hot way beside ours over all scores at once (`threshold`) and over blocks of queries (`streamed`, what the
layer does); batch 1, 4 index heads of 32, float32, one document. A JSON row a point, kept in
`RUNS/selection/results.jsonl` and not measured again by the same versions unless `--fresh`; then a table.
"""

from absl import flags as absl_flags

from launch import flags, measuring
from research.settings.config import Settings

measuring.define_fresh()
measuring.define_root()
measuring.define_lengths("4096", "8192", "16384")
_TOP_K = absl_flags.DEFINE_integer("top_k", 512, "entries that a query selects", lower_bound=1)
_TIMEOUT = absl_flags.DEFINE_float("timeout_minutes", 10.0, "for one point, after which it is a row that says so")

_MIB = 2**-20


def main() -> int:
    """Measures every way at every length, and returns the exit code."""
    from research.measure import selection
    from research.measure.pipeline import Planned

    planned = []
    for seq_len in measuring.lengths():
        bench = {"timeout_minutes": _TIMEOUT.value}
        settings = Settings().replace(attention={"top_k": _TOP_K.value}, data={"seq_len": seq_len}, bench=bench)
        planned += [Planned(program, {}, selection.timeout(settings)) for program in selection.programs(settings, "")]
    folder, console = measuring.folder(measuring.root(), "selection", ""), measuring.console()
    measured = measuring.measure(planned, folder / measuring.RESULTS, {}, console, measuring.print_row)
    table = measuring.table("way", numbers=("tokens", "entries", "s", "temp MiB", "peak MiB"))
    table.add_column("status")
    for row in measured.rows:
        seconds = f"{row['seconds']:.3f}" if "seconds" in row else ""
        sizes = (f"{row[key] * _MIB:,.0f}" if key in row else "" for key in ("temp_bytes", "peak_rss_bytes"))
        table.add_row(row["way"], f"{row['seq_len']:,}", f"{row['entries']:,}", seconds, *sizes, row["status"])
    console.print(table)
    return measuring.end(measured, folder, console)


if __name__ == "__main__":
    flags.run(main, check=measuring.lengths)
