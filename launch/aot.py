"""Compiles an experiment's sweep for a TPU that is not there: `make aot`, or

    python launch/aot.py --config=experiments/seed_claims.py --config.aot.topology=v5p:2x2x1

Needs `requirements-tpu.txt`. `--config.aot.what="('op', 'layer', 'step')"` chooses what is compiled of each point. Rows
are appended to `<run.root>/aot/<experiment>/results.jsonl` as they come; points that stand there, compiled by the same
versions, are not compiled again unless `--fresh`. `--search` tries the legal blocks and groups of heads for the
experiment's own config instead of its sweep, prints those that no other beats in peak bytes, roofline and compile time,
and writes the one with the lowest roofline, then the least memory, as a preset: `--preset=NAME` in a later run.
Without it, overrides narrow the sweep or apply to all of its points, by the rule in `research/sweeps/experiment.py`.
"""

import datetime
import pathlib
import sys

import jax
import rich.box
import rich.console
import rich.progress
import rich.table
from absl import flags as absl_flags

from analysis import aot as pictures
from analysis import frame
from launch import flags
from research.errors import ConfigError
from research.measure import aot, search
from research.runs import files, tracking
from research.runs.folder import environment, record_start
from research.sweeps import experiment, sweep

_FRESH = absl_flags.DEFINE_bool("fresh", False, "compile also what stands in the results")
_SEARCH = absl_flags.DEFINE_string("search", "", "name of a preset: search settings for the config, and save the best")

_GIB = 2**-30
# Column, key, unit factor, format.
_NUMBERS = (
    ("schedule s", "schedule_seconds", 1, "{:.2f}"),
    ("lower s", "lower_seconds", 1, "{:.2f}"),
    ("compile s", "compile_seconds", 1, "{:.1f}"),
    ("temp GiB", "temp_bytes", _GIB, "{:,.2f}"),
    ("peak GiB", "peak_bytes", _GIB, "{:,.2f}"),
    ("roofline ms", "roofline_seconds", 1e3, "{:,.1f}"),
)


def main() -> int:
    """Compiles what the command line describes, and returns the exit code."""
    jax.config.update("jax_platforms", "cpu")
    config, target = flags.config(), flags.target()
    console = rich.console.Console(width=None if sys.stdout.isatty() else 160)
    planned = search.plan(config) if _SEARCH.value else aot.plan(target, flags.overrides())
    try:
        aot.versions()
    except ModuleNotFoundError as error:
        raise ConfigError("libtpu is not installed: pip install -r requirements-tpu.txt, or make aot") from error

    name = sweep.full_name if _SEARCH.value else sweep.folder_name  # a search has no points among which to choose
    folder = pathlib.Path(config.run.root) / "aot" / name(target, flags.overrides())
    folder.mkdir(parents=True, exist_ok=True)
    record_start(folder, environment() | {"compilers": aot.versions()})
    results = folder / "results.jsonl"
    if _FRESH.value:  # those of other points stay: a search and a sweep share the folder
        anew = {point.key() for _, point, _ in planned}
        files.write_lines(results, [row for row in files.read_lines(results) if row["key"] not in anew])
    rows = _compile(console, planned, results)

    console.print(_table(rows))
    console.print("roofline: a model of the chip's peak FLOP/s and bandwidth, not a measurement", style="italic")
    tracking.send_table(folder, config, "aot", rows)
    if _SEARCH.value:
        _conclude(console, config, _SEARCH.value, rows)
    else:
        module, _ = experiment.load(target)
        for line in getattr(module, "report_aot", lambda rows: [])(rows):
            console.print(line, markup=False, soft_wrap=True)
    pictures.draw(rows, folder / "aot.png")
    console.print(f"results: {results}\nplot: {folder / 'aot.png'}", soft_wrap=True)
    return 0


def _compile(console: rich.console.Console, planned: list[tuple], results: pathlib.Path) -> list[dict]:
    """The rows of all points, old and new."""
    stored: dict[str, dict[str, dict]] = {}
    files.repair_lines(results)
    if results.exists():
        for row in files.read_lines(results):
            stored.setdefault(row["key"], {})[row["phase"]] = row
    stamp, rows = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}, []
    with rich.progress.Progress(console=console) as bar:
        task = bar.add_task("", total=len(planned))
        for overrides, point, timeout in planned:
            bar.update(task, description=f"{point.what} {experiment.label(overrides)}"[:100])
            found = stored.get(point.key(), {})
            if set(found) == set(aot.PHASES[point.what]):
                rows += found.values()
            else:
                for row in aot.run(point, timeout):
                    rows.append(stamp | row | {"overrides": overrides})
                    files.append_line(results, rows[-1])
            bar.advance(task)
    return rows


def _conclude(console: rich.console.Console, config, name: str, rows: list[dict]) -> None:
    """Prints the Pareto front, and saves the best as a preset."""
    front = search.front(rows)
    if not front:
        raise ConfigError("no setting of the search compiles; the table says why")
    console.print(f"Nothing beats these {len(front)} of {len(rows)}:")
    console.print(_table(front))
    path = flags.save_preset(config, name, front[0]["overrides"])
    console.print(f"preset {name}: {experiment.label(front[0]['overrides'])} in {path}", soft_wrap=True)


def _table(rows: list[dict]) -> rich.table.Table:
    table = rich.table.Table("program", "tokens", "phase", "setting", box=rich.box.SIMPLE_HEAD)
    for heading, *_ in _NUMBERS:
        table.add_column(heading, justify="right")
    table.add_column("bound")
    table.add_column("status")
    for row in rows:
        numbers = (form.format(row[key] * factor) if key in row else "" for _, key, factor, form in _NUMBERS)
        what = f"{row['what']} {row['visibility']}"
        phase = row["phase"].replace("forward", "fwd").replace("backward", "bwd").replace("_", "+")
        table.add_row(
            what,
            f"{row['seq_len']:,}",
            phase,
            frame.setting(row).removeprefix(f"{what} "),
            *numbers,
            row.get("bound", ""),
            _status(row),
        )
    return table


def _status(row: dict) -> str:
    if "needed_bytes" not in row:
        return row["status"]
    needed, available = row["needed_bytes"], row["available_bytes"]
    unit, factor = next((u, f) for u, f in (("GiB", 2**30), ("MiB", 2**20)) if available >= f)
    return f"{row['status']}: {needed / factor:,.2f} of {available / factor:,.2f} {unit}"


if __name__ == "__main__":
    flags.run(main)
