"""Compiles an experiment's sweep for a TPU or a GPU that is not there: `make aot`, `make aot-gpu`, or

    python launch/aot.py --config=experiments/seed_claims.py --config.aot.topology=v5p:2x2x1
    python launch/aot.py --config=experiments/gpu_attention.py --config.aot.topology=h100:1

Needs `requirements-tpu.txt`, or for GPUs `requirements-gpu-aot.txt`. `--config.aot.what="('op', 'layer', 'step')"`
chooses what is compiled of each point. Rows are appended to `<run.root>/aot/<experiment>/results.jsonl` as they come;
points that stand there, compiled by the same versions, are not compiled again unless `--fresh`. `--search` tries the
legal blocks and groups of heads for the experiment's own config instead of its sweep, prints those that no other beats
in peak bytes, roofline and compile time, and writes the one with the lowest roofline, then the least memory, as a
preset: `--preset=NAME` in a later run. Without it, overrides narrow the sweep or apply to all of its points, by the
rule in `research/sweeps/experiment.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import rich.console
import rich.table
from absl import flags as absl_flags

from launch import flags, measuring, presets
from research import hardware
from research.errors import ConfigError
from research.settings.config import Settings
from research.sweeps import experiment

if TYPE_CHECKING:
    from research.measure import pipeline

flags.define_config()
measuring.define_fresh()
_SEARCH = absl_flags.DEFINE_string("search", "", "name of a preset: search settings for the config, and save the best")

_GIB = 2**-30
_UNKNOWN = {
    "tpu": "not told without the TPU: times",
    "gpu": "not told without the GPU: times, spilled registers, and tiles by autotuning, on which temporaries depend",
}
_COUNTS = {"kernels", "loop_trips"}
# Column, key, unit factor, format.
_NUMBERS = (
    ("schedule s", "schedule_seconds", 1, "{:.2f}"),
    ("lower s", "lower_seconds", 1, "{:.2f}"),
    ("compile s", "compile_seconds", 1, "{:.1f}"),
    ("temp GiB", "temp_bytes", _GIB, "{:,.2f}"),
    ("peak GiB", "peak_bytes", _GIB, "{:,.2f}"),
    ("kernels", "kernels", 1, "{:,.0f}"),
    ("loop trips", "loop_trips", 1, "{:,.0f}"),
    ("roofline ms", "roofline_seconds", 1e3, "{:,.1f}"),
)


def main() -> int:
    """Compiles what the command line describes, and returns the exit code."""
    import jax

    from analysis import aot as pictures
    from research.measure import search
    from research.sweeps import sweep

    jax.config.update("jax_platforms", "cpu")
    settings, target = flags.common_settings(), flags.target()
    console = measuring.console()
    planned = search.plan(settings) if _SEARCH.value else _plan(target, settings)
    platform = _check_topologies(planned)

    # A search has no points among which to choose.
    name = sweep.full_name(target, flags.overrides()) if _SEARCH.value else measuring.sweep_folder()
    folder = measuring.folder(settings.run.root, "aot", name)
    measured = measuring.measure(planned, folder / measuring.RESULTS, {}, console)
    console.print(_table(measured.rows))
    console.print("roofline: a model of the chip's peak FLOP/s and bandwidth, not a measurement", style="italic")
    console.print(_UNKNOWN[platform], style="italic")
    if _SEARCH.value and not measured.left:
        _conclude(console, settings, _SEARCH.value, measured.rows)
    measuring.conclude("aot", measured, folder, settings, console)
    if measured.rows:
        pictures.draw(measured.rows, folder / "aot.png")
        console.print(f"plot: {folder / 'aot.png'}", soft_wrap=True)
    return measuring.end(measured, folder, console)


def _plan(target: str, settings: Settings) -> list[pipeline.Planned]:
    """Lists of blocks that do not fit the scalar memory are no error: the compiler is asked."""
    from research.measure import pipeline

    platform = hardware.topology_chip(settings.aot.topology).platform
    return pipeline.plan("aot", target, flags.overrides(), platform, checks_memory=False)


def _check_topologies(planned: list[pipeline.Planned]) -> str:
    """The platform that all points compile for; raises ConfigError where one cannot be compiled for."""
    from research.measure import targets

    found = {program.settings.aot.topology: program.settings for program, *_ in planned}
    for settings in found.values():
        targets.check(settings)
    platforms = {hardware.topology_chip(topology).platform for topology in found}
    if len(platforms) > 1:
        raise next(iter(found.values())).aot.error("topology", f"of one platform in all points, not {sorted(found)}")
    return platforms.pop()


def _conclude(console: rich.console.Console, settings: Settings, name: str, rows: list[dict]) -> None:
    """Prints the Pareto front, and saves the best as a preset."""
    from research.measure import search

    front = search.front(rows)
    if not front:
        raise ConfigError("no setting of the search compiles; the table says why")
    console.print(f"Nothing beats these {len(front)} of {len(rows)}:")
    console.print(_table(front))
    path = presets.save(settings.run.root, name, front[0]["overrides"])
    console.print(f"preset {name}: {experiment.label(front[0]['overrides'])} in {path}", soft_wrap=True)


def _table(rows: list[dict]) -> rich.table.Table:
    from analysis import frame

    # Counted for GPUs alone.
    columns = [column for column in _NUMBERS if column[1] not in _COUNTS or any(column[1] in row for row in rows)]
    table = measuring.table("program", "tokens", "phase", "setting", numbers=tuple(heading for heading, *_ in columns))
    for column in (table.columns[3], table.columns[0]):
        column.no_wrap = False
    table.add_column("bound")
    table.add_column("status")
    for row in rows:
        numbers = (form.format(row[key] * factor) if key in row else "" for _, key, factor, form in columns)
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
