"""What schedules cost before anything runs: blocks, bytes by memory, build time.

    python launch/masks.py --config=experiments/mask_strategies.py          # every splash point of a sweep
    python launch/masks.py --visibility=hca --schedule=closed_form --seq_len=1048576 --block=1024

Overrides narrow the sweep or apply to all of its points, by the rule in `research/sweeps/experiment.py`.
`--json` prints one row a line instead of the table; `--plot=FILE.png` draws the blocks that the first one visits.
A schedule whose lists do not fit the scalar memory of a TPU core is refused, with its count of blocks.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import rich.console
import rich.table
from absl import flags as absl_flags

from launch import flags, measuring
from research.attention.visibility import KINDS
from research.errors import ConfigError, SettingError
from research.settings import fields
from research.settings.config import Settings
from research.sweeps import experiment

if TYPE_CHECKING:
    from research.measure.pipeline import Planned

flags.define_config()
measuring.define_fresh()
measuring.define_root()
_VISIBILITY = absl_flags.DEFINE_enum("visibility", "hca", list(KINDS), "kind of attention; without --config")
_SCHEDULE = absl_flags.DEFINE_string("schedule", "auto", "name of a schedule; without --config")
_SEQ_LEN = absl_flags.DEFINE_integer("seq_len", 65536, "tokens; without --config", lower_bound=1)
_BLOCK = absl_flags.DEFINE_integer("block", 512, "queries and keys per block; without --config", lower_bound=1)
_STEPS = absl_flags.DEFINE_integer("dq_reduction_steps", 3, "0 or 3; without --config")
_JSON = absl_flags.DEFINE_bool("json", False, "print JSON rows")
_PLOT = absl_flags.DEFINE_string("plot", "", "a file to draw the first schedule's blocks in: .png, .pdf, .svg")


def main() -> int:
    """Measures what the command line describes, and returns the exit code."""
    from analysis import blocks, style

    plot = pathlib.Path(_PLOT.value).expanduser() if _PLOT.value else None
    if plot:
        style.check_file("--plot", plot)
    console = measuring.console(to_stderr=_JSON.value)
    if flags.given():
        planned, settings, name = _sweep(console), flags.common_settings(), measuring.sweep_folder()
    else:
        settings = _single()
        planned, name = _planned(settings, {}), "single"
    folder = measuring.folder(settings.run.root, "masks", name)
    each = measuring.print_row if _JSON.value else lambda row: None
    measured = measuring.measure(planned, folder / measuring.RESULTS, {}, console, each)
    if not _JSON.value:
        console.print(_table(measured.rows))
    measuring.conclude("masks", measured, folder, settings, console)
    if plot:
        blocks.draw([planned[0].program], plot)
        console.print(f"plot: {plot}", soft_wrap=True)
    return measuring.end(measured, folder, console)


def _check_flags() -> None:
    """Raises ConfigError where a flag says nothing: those of a single schedule beside a sweep, a preset without one."""
    single = (*(flag.name for flag in (_VISIBILITY, _SCHEDULE, _SEQ_LEN, _BLOCK, _STEPS)), "runs")
    for name in single if flags.given() else ():
        if absl_flags.FLAGS[name].present:
            raise ConfigError(f"--{name}: has no effect with --config, whose sweep says it")
    if not flags.given() and absl_flags.FLAGS["preset"].present:
        raise ConfigError("--preset: has no effect without --config")


def _single() -> Settings:
    """Of the schedule that the flags describe.

    Raises:
      ConfigError: a flag's value is impossible; names it.
    """
    from research.measure import masks

    kind = _VISIBILITY.value
    schedule = "csa_schedule" if KINDS[kind].selects else "schedule"
    attention = {"backend": "splash", "top_k": 512, schedule: _SCHEDULE.value, "dq_reduction_steps": _STEPS.value}
    attention |= {"block_q": _BLOCK.value, "block_kv": _BLOCK.value}
    wandb = {"mode": "disabled"}  # nothing that belongs to an experiment
    try:
        settings = Settings().replace(
            model={"layers": (kind,), "dtype": "bfloat16"},
            attention=attention,
            data={"seq_len": _SEQ_LEN.value},
            wandb=wandb,
            run={"root": measuring.root()},
        )
        masks.programs(settings)
    except SettingError as error:
        named = {"schedule": _SCHEDULE, "csa_schedule": _SCHEDULE, "block_q": _BLOCK, "block_kv": _BLOCK}
        flag = named.get(error.field.rpartition(".")[2], _STEPS)
        raise ConfigError(f"--{flag.name}={error.value}: must be {error.allowed}") from error
    return settings


def _sweep(console: rich.console.Console) -> list[Planned]:
    """The distinct schedules among the splash points of an experiment's sweep; says which cannot be compiled."""
    from research.sweeps import sweep

    target, common, found = flags.target(), flags.overrides(), {}
    for point in experiment.points(target, common):
        try:
            _, settings = sweep.settings_at(target, common, point)
            for planned in _planned(settings, point.overrides):
                found.setdefault(planned.program, planned)
        except ConfigError as error:
            console.print(f"{point.label}: {error}", style="red", markup=False)
    if not found:
        raise ConfigError(f"--config={target}: no point of its sweep can use the splash backend")
    return list(found.values())


def _planned(settings: Settings, overrides: fields.Overrides) -> list[Planned]:
    from research.measure import masks
    from research.measure.pipeline import Planned

    return [Planned(program, overrides, masks.timeout(settings)) for program in masks.programs(settings)]


def _table(rows: list[dict]) -> rich.table.Table:
    table = rich.table.Table(title="forward blocks; bytes and seconds of forward and backward together")
    names = ("kind", "schedule", "tokens", "block", "dq", "active", "full", "partial", "distinct", "useful")
    for name in (*names, "host MiB", "HBM MiB", "SMEM KiB", "lists s", "build s"):
        table.add_column(name, justify="left" if name in names[:2] else "right", no_wrap=True)
    for row in (row for row in rows if row["status"] == "ok"):
        counts = (row[name] for name in ("active", "full", "partial", "unique_partial"))
        table.add_row(
            row["visibility"],
            row["schedule"],
            f"{row['seq_len']:,}",
            f"{row['block_q']} x {row['block_kv']}",
            str(row["dq_reduction_steps"]),
            *(f"{count:,}" for count in counts),
            f"{row['useful_fraction']:.1%}",
            f"{row['host_bytes'] / 2**20:,.1f}",
            f"{row['hbm_bytes'] / 2**20:,.1f}",
            f"{row['smem_bytes'] / 2**10:,.1f}",
            f"{row['schedule_seconds']:.4g}",
            f"{row['build_seconds']:.4g}",
        )
    return table


if __name__ == "__main__":
    flags.run(main, config_required=False, check=_check_flags)
