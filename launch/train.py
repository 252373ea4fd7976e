"""Trains one language model: `python launch/train.py --config=experiments/mask_strategies.py:demo`.

Any field of the config can be overridden: `--config.attention.block_q=256 --config.model.layers="('hca',)"`.
`--point=LABEL` trains one point of the experiment's sweep, as wandb's agents do; fields of the sweep keep its values.
A run that was killed goes on from its last checkpoint when it is started again with the same `--config.run.id`; one
that SIGTERM or SIGINT stopped has saved its last step, and exits with 75. `--dry_run` shows the resolved config, all
shapes, and what a step takes in FLOPs and memory, and trains nothing.

Several processes, on one machine or several, train one model when all are given the same command with
`--config.distributed.coordinator=auto` (clusters that JAX knows), or `=host:port` with `num_processes` and
`process_id`; `run.root` must be a folder that they share.
"""

import datetime
import os
import pathlib
from typing import Any

import jax
import rich.console
from absl import flags as absl_flags

from launch import flags
from research.parallel import batch as parallel
from research.runs.folder import SUMMARY
from research.settings import fields
from research.settings.config import read
from research.sweeps import experiment
from research.training import dry_run, run

_DRY_RUN = absl_flags.DEFINE_bool("dry_run", False, "show what would be trained, and stop")

absl_flags.DEFINE_string("point", "", "a point of the experiment's sweep, by its label")  # `flags.expand` reads it


def main() -> int:
    """Runs what the command line describes, and returns the exit code."""
    config, overrides = flags.config(), flags.overrides()
    if not (config.run.id or _DRY_RUN.value or config.distributed.coordinator):
        config.run.id = default_id(flags.target(), overrides)
    settings = read(config)
    parallel.join(settings)
    console = rich.console.Console(quiet=jax.process_index() > 0)
    if _DRY_RUN.value:
        dry_run.dry_run(settings, console)
        return 0
    summary = run.run(settings, overrides, console)
    console.print(f"{ending(summary)}: {settings.run.root}/{settings.run.id}/{SUMMARY}", soft_wrap=True)
    return 0


def ending(summary: dict[str, Any]) -> str:
    """The line that a run ends with: losses, in bits per byte where bytes are predicted, and speed."""
    bits = f" ({summary['val_bits_per_byte']:.3f} bits/byte)" if "val_bits_per_byte" in summary else ""
    losses = f"loss {summary['final_loss']:.4f}, validation {summary['val_loss']:.4f}{bits}"
    return f"{losses}, {summary['step_seconds']:.3f} s/step, {summary['tokens_per_second']:,.0f} tokens/s"


def default_id(target: str, overrides: fields.Overrides) -> str:
    """Date, experiment and overrides: `20260131-235959-mask_strategies-demo-block_q=256`.

    Under an agent of wandb its sweep and run stand for the date, so that a run it starts again finds its checkpoint.
    """
    path, _, arg = target.partition(":")
    sweep = os.environ.get("WANDB_SWEEP_ID")
    start = f"{sweep}-{os.environ['WANDB_RUN_ID']}" if sweep else f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    parts = (start, pathlib.Path(path).stem, arg, experiment.label(overrides))
    return "-".join(part for part in parts if part)


if __name__ == "__main__":
    flags.run(main)
