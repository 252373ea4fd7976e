"""A run and its folder: a config is trained once, resumed when killed, and its failure recorded."""

import contextlib
import json
import pathlib
from typing import Any

import ml_collections
import rich.console

from research import errors, tracking
from research.config import ConfigError
from research.experiment import Overrides
from research.training import loop

FINISHED = "ok"

# What a run may go on with although it differs from what it was started with.
_MAY_CHANGE = tuple(
    f"train.{name}" for name in ("steps", "log_every", "eval_every", "checkpoint_every", "keep_last", "keep_best")
)


def run(config: ml_collections.ConfigDict, overrides: Overrides, console: rich.console.Console) -> dict[str, Any]:
    """Trains from the start, or from the newest checkpoint in the run's folder, to the end.

    Args:
      config: a full config; `run.root` and `run.id` name the folder, `research.tracking` says what it holds.
      overrides: how the config differs from its experiment's; for the record.
      console: where to show the configuration and progress.

    Returns:
      The summary, as in `summary.json`. A run that has finished is not repeated; with more `train.steps` it goes on.

    Raises:
      ConfigError: a setting is impossible, or the folder holds a run with other settings.
      NotImplementedError: a backend cannot serve the request.
      What else `loop.train` raises. All but the refusal to touch another run's folder are recorded in `summary.json`,
        as `errors.kind` names them.
    """
    folder = pathlib.Path(config.run.root) / config.run.id
    _claim(folder, config, console)
    summary = tracking.read_json(folder / tracking.SUMMARY)
    if summary.get("status") == FINISHED and summary["steps"] >= config.train.steps:
        console.print(f"{folder} is finished, nothing to do", soft_wrap=True)
        return summary
    (folder / tracking.SUMMARY).unlink(missing_ok=True)  # how an earlier attempt ended
    try:
        results = loop.train(folder, config, console)
    except Exception as error:
        failure = {"status": errors.kind(error), "message": str(error), "overrides": overrides}
        with contextlib.suppress(OSError):  # a full disk must not hide the error
            tracking.write_json(folder / tracking.SUMMARY, failure)
        raise
    summary = {"status": FINISHED, **results, "overrides": overrides}
    tracking.write_json(folder / tracking.SUMMARY, summary)
    return summary


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """How two configs, as JSON, differ in what they compute; where they run and record it does not count."""
    changed = []
    for name in sorted((there.keys() | here.keys()) - {"run", "wandb", "profile", "distributed"}):
        left, right = there.get(name), here.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            changed += [f"{name}.{change}" for change in differences(left, right)]
        elif left != right:
            changed.append(f"{name}: {left!r} there, {right!r} here")
    return changed


def as_json(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The config as `config.json` holds it: tuples are lists."""
    return json.loads(config.to_json_best_effort())


def _claim(folder: pathlib.Path, config: ml_collections.ConfigDict, console: rich.console.Console) -> None:
    """Makes the folder this config's; raises ConfigError if it is another's, or cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = tracking.read_json(folder / tracking.CONFIG)
    except OSError as error:
        raise ConfigError(f"config.run.root={config.run.root!r}: cannot hold the folder of the run: {error}") from error
    here = as_json(config)
    changed = differences(there, here) if there else []
    if any(not change.startswith(_MAY_CHANGE) for change in changed):
        raise ConfigError(
            f"config.run.id={config.run.id!r}: {folder} holds a run with other settings ({'; '.join(changed)}); "
            "choose another id, or remove the folder"
        )
    for change in changed:
        console.print(f"goes on with another {change}", soft_wrap=True)
    tracking.write_json(folder / tracking.CONFIG, here)
