"""An experiment's sweep as a sweep of wandb, whose agents run its points on any number of machines.

wandb's grid has one parameter, `point`, whose values are the labels of the points: points need not form a product of
settings, and the agents run exactly those that `sweep()` returns. `launch/train.py --point=LABEL` reads the rest from
the experiment. Further parameters, `config.model.hidden` for one, can be added to the file by hand.
"""

import os
from typing import Any

import ml_collections
import wandb

from research.errors import ConfigError
from research.sweeps import sweep
from research.sweeps.experiment import Overrides, as_flags


def describe(
    target: str, common: Overrides, points: list[sweep.Point], settings: ml_collections.ConfigDict
) -> dict[str, Any]:
    """The sweep as wandb's sweep file has it; agents are to be started in the repository's root.

    Args:
      target: the experiment and its argument, `experiments/x.py:arg`.
      common: overrides for all points.
      points: `sweep.plan` of these.
      settings: `config.wandb`.

    Raises:
      ConfigError: runs are not to be recorded with wandb, or a point must run after another.
    """
    if later := next((point for point in points if point.after), None):
        raise ConfigError(
            f"--to=wandb: {later.folder.name} is after {later.after[0]}, and wandb's agents keep no order; "
            "must be --to=here or --to=slurm, or narrowed by overrides to points that are after none"
        )
    if settings.mode == "disabled":
        raise ConfigError("config.wandb.mode=disabled: must be auto, online or offline for a sweep's agents")
    python, program, *_ = points[0].command
    return {
        "name": sweep.full_name(target, common),
        "project": settings.project,
        "program": program,
        "method": "grid",
        "command": ["${env}", python, "${program}", f"--config={target}", *as_flags(common), "${args}"],
        "parameters": {"point": {"values": [point.folder.name for point in points]}},
    }


def start_command(sweep: str) -> str:
    """The command that starts an agent, given the sweep's full name, `ENTITY/PROJECT/ID`.

    Signals are forwarded: else an agent that is stopped waits for its run's end, or leaves the run behind.
    """
    return f"wandb agent --forward-signals {sweep}"


def create(description: dict[str, Any]) -> str:
    """Registers a sweep with wandb's server, and returns the command that starts an agent for it.

    Raises:
      ConfigError: not logged in.
    """
    if not wandb.login(prompt=False, verify=False):
        raise ConfigError("--create: not logged in to wandb; run `wandb login` first, or leave --create out")
    identity = wandb.sweep(description, project=description["project"])
    # wandb leaves here whose the sweep has become; an agent elsewhere may belong to someone with another default.
    entity = os.environ.get(wandb.env.ENTITY)
    return start_command("/".join(part for part in (entity, description["project"], identity) if part))
