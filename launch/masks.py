"""What schedules cost before anything runs: blocks, bytes by memory, build time.

    python launch/masks.py --config=experiments/mask_strategies.py          # every splash point of a sweep
    python launch/masks.py --visibility=hca --schedule=closed_form --seq_len=1048576 --block=1024

Overrides narrow the sweep or apply to all of its points, by the rule in `research/sweeps/experiment.py`.
`--json` prints one row a line instead of the table; `--plot=FILE.png` draws the blocks that the first one visits.
A schedule whose lists do not fit the scalar memory of a TPU core is refused, with its count of blocks.
"""

import json
import pathlib
import sys

import rich.console
import rich.table
from absl import flags as absl_flags

from analysis import blocks
from launch import flags
from research import config as config_lib
from research.settings import fields
from research.attention import backends, spec
from research.errors import ConfigError
from research.measure import masks
from research.model import spec as model_spec
from research.sweeps import experiment

_VISIBILITY = absl_flags.DEFINE_enum("visibility", "hca", list(KINDS), "kind of attention; without --config")
_SCHEDULE = absl_flags.DEFINE_string("schedule", "auto", "name of a schedule; without --config")
_SEQ_LEN = absl_flags.DEFINE_integer("seq_len", 65536, "tokens; without --config", lower_bound=1)
_BLOCK = absl_flags.DEFINE_integer("block", 512, "queries and keys per block; without --config", lower_bound=1)
_STEPS = absl_flags.DEFINE_integer("dq_reduction_steps", 3, "0 or 3; without --config")
_JSON = absl_flags.DEFINE_bool("json", False, "print JSON rows")
_PLOT = absl_flags.DEFINE_string("plot", "", "a PNG file to draw the first schedule's blocks in")


def main() -> int:
    """Measures what the command line describes, and returns the exit code."""
    _check_flags()
    console = rich.console.Console(stderr=_JSON.value, width=None if sys.stdout.isatty() else 150)
    requests = _sweep_requests(console) if flags.given() else [_single_request()]
    rows = []
    for request in requests:
        rows.append(masks.measure(request))
        if _JSON.value:
            print(json.dumps(rows[-1]), flush=True)
    if not _JSON.value:
        console.print(_table(rows))
    if flags.given():
        module, _ = experiment.load(flags.target())
        for line in getattr(module, "report_masks", lambda rows: [])(rows):
            console.print(line, markup=False, soft_wrap=True)
    if _PLOT.value:
        blocks.draw(requests[:1], pathlib.Path(_PLOT.value))
        console.print(f"plot: {_PLOT.value}")
    return 0


def _check_flags() -> None:
    """Raises ConfigError where a flag says nothing: those of a single schedule beside a sweep, a preset without one."""
    single = (_VISIBILITY, _SCHEDULE, _SEQ_LEN, _BLOCK, _STEPS)
    for flag in single if flags.given() else ():
        if absl_flags.FLAGS[flag.name].present:
            raise ConfigError(f"--{flag.name}: has no effect with --config, whose sweep says it")
    if not flags.given() and absl_flags.FLAGS["preset"].present:
        raise ConfigError("--preset: has no effect without --config")


def _single_request() -> masks.Request:
    config = config_lib.base_config()
    config.attention.top_k = 512
    visibility = model_spec.from_config(config).attention.visibility(_VISIBILITY.value)
    return _request(visibility, _SEQ_LEN.value, _SCHEDULE.value, _BLOCK.value, _BLOCK.value, _STEPS.value)


def _sweep_requests(console: rich.console.Console) -> list[masks.Request]:
    """The distinct schedules among the splash points of an experiment's sweep; tells which cannot be compiled."""
    module, arg = experiment.load(flags.target())
    requests = {}
    for point in experiment.points(flags.target(), flags.overrides()):
        config = module.get_config(arg)
        fields.override(config, flags.overrides() | point.overrides)
        layers = model_spec.from_config(config, "tpu").attention
        if layers.backend != "splash":
            continue
        try:
            for kind, effective in config_lib.effective(config, "tpu").items():
                sizes = (effective[name] for name in ("schedule", "block_q", "block_kv", "dq_reduction_steps"))
                requests[_request(layers.visibility(kind), config.data.seq_len, *sizes)] = None
        except ConfigError as error:
            console.print(f"{point.label}: {error}", style="red", markup=False)
    if not requests:
        raise ConfigError(f"--config={flags.target()}: no point of its sweep can use the splash backend")
    return list(requests)


def _request(visibility, seq_len: int, schedule: str, block_q: int, block_kv: int, steps: int) -> masks.Request:
    options = backends.Options(schedule, block_q=block_q, block_kv=block_kv, dq_reduction_steps=steps)
    try:
        how = {"packed": False, "target": backends.target("tpu")}
        effective = backends.get("splash").resolve(visibility, seq_len, 1, 128, "bfloat16", options, **how)
    except ValueError as error:
        raise ConfigError(f"--{error}") from error
    return masks.Request(visibility, effective["schedule"], seq_len, block_q, block_kv, effective["dq_reduction_steps"])


def _table(rows: list[dict]) -> rich.table.Table:
    table = rich.table.Table(title="forward blocks; bytes and seconds of forward and backward together")
    names = ("kind", "schedule", "tokens", "block", "dq", "active", "full", "partial", "distinct", "useful")
    for name in (*names, "host MiB", "HBM MiB", "SMEM KiB", "lists s", "build s"):
        table.add_column(name, justify="left" if name in names[:2] else "right", no_wrap=True)
    for row in rows:
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
    flags.run(main, config_required=False)
