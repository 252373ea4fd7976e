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
import secrets
from typing import Any

import rich.console
from absl import flags as absl_flags

from launch import flags
from research import exits
from research.settings import fields
from research.sweeps import experiment

flags.define_config()
_DRY_RUN = absl_flags.DEFINE_bool("dry_run", False, "show what would be trained, and stop")
absl_flags.DEFINE_string("point", "", "a point of the experiment's sweep, by its label")  # `flags` reads it


def main() -> int:
    """Runs what the command line describes, and returns the exit code."""
    import jax

    from research import devices
    from research.parallel import batch as parallel
    from research.runs.folder import SUMMARY
    from research.training import dry_run, run

    settings, overrides = flags.settings(), flags.overrides()
    parallel.join(settings)
    devices.require()
    console = rich.console.Console(quiet=jax.process_index() > 0)
    if _DRY_RUN.value:
        dry_run.dry_run(settings, console)
        return exits.FINISHED
    if not settings.run.id:
        settings = settings.replace(run={"id": default_id(flags.target(), overrides)})
    summary = run.run(settings, overrides, console)
    console.print(f"{ending(summary)}: {settings.run.root}/{settings.run.id}/{SUMMARY}", soft_wrap=True)
    return exits.FINISHED


def ending(summary: dict[str, Any]) -> str:
    """The line that a run ends with: losses, in bits per byte where bytes are predicted, and speed."""
    bits = f" ({summary['val_bits_per_byte']:.3f} bits/byte)" if "val_bits_per_byte" in summary else ""
    losses = f"loss {summary['final_loss']:.4f}, validation {summary['val_loss']:.4f}{bits}"
    return f"{losses}, {summary['step_seconds']:.3f} s/step, {summary['tokens_per_second']:,.0f} tokens/s"


def default_id(target: str, overrides: fields.Overrides) -> str:
    """Date, digits by chance, experiment and overrides: `20260131-235959-3fa2c1-mask_strategies-demo-block_q=256`.

    The digits tell runs apart that start in one second. Under an agent of wandb its sweep and run stand for the date
    and them, so that a run it starts again finds its checkpoint.
    """
    path, _, arg = target.partition(":")
    start = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    if sweep := os.environ.get("WANDB_SWEEP_ID"):
        start = f"{sweep}-{os.environ['WANDB_RUN_ID']}"
    parts = (start, pathlib.Path(path).stem, arg, experiment.label(overrides))
    return "-".join(part for part in parts if part)


if __name__ == "__main__":
    flags.run(main, check=flags.settings)
