"""A run and its folder: a config is trained once, resumed when killed, and its failure recorded."""

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


def run(config: ml_collections.ConfigDict, overrides: Overrides, console: rich.console.Console) -> dict[str, Any]:
    """Trains from the start, or from the newest checkpoint in the run's folder, to the end.

    Args:
      config: a full config; `run.root` and `run.id` name the folder, `research.tracking` says what it holds.
      overrides: how the config differs from its experiment's; for the record.
      console: where to show the configuration and progress.

    Returns:
      The summary, as in `summary.json`. A run that has finished is not repeated.

    Raises:
      ConfigError: a setting is impossible, or the folder holds a run with other settings.
      NotImplementedError: a backend cannot serve the request.
      NonFiniteLossError: the loss became NaN or infinite.
      All but the refusal to touch another run's folder are recorded in `summary.json`, as `errors.kind` names them.
    """
    folder = pathlib.Path(config.run.root) / config.run.id
    _claim(folder, config)
    summary = tracking.read_json(folder / tracking.SUMMARY)
    if summary.get("status") == FINISHED:
        console.print(f"{folder} is finished, nothing to do", soft_wrap=True)
        return summary
    (folder / tracking.SUMMARY).unlink(missing_ok=True)  # how an earlier attempt failed
    try:
        results = loop.train(folder, config, console)
    except Exception as error:
        failure = {"status": errors.kind(error), "message": str(error), "overrides": overrides}
        tracking.write_json(folder / tracking.SUMMARY, failure)
        raise
    summary = {"status": FINISHED, **results, "overrides": overrides}
    tracking.write_json(folder / tracking.SUMMARY, summary)
    return summary


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """How two configs, as JSON, differ in what they compute; where they record it does not count."""
    changed = []
    for name in sorted((there.keys() | here.keys()) - {"run", "wandb"}):
        left, right = there.get(name), here.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            changed += [f"{name}.{change}" for change in differences(left, right)]
        elif left != right:
            changed.append(f"{name}: {left!r} there, {right!r} here")
    return changed


def as_json(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The config as `config.json` holds it: tuples are lists."""
    return json.loads(config.to_json_best_effort())


def _claim(folder: pathlib.Path, config: ml_collections.ConfigDict) -> None:
    """Makes the folder this config's; raises ConfigError if it is another's."""
    there, here = tracking.read_json(folder / tracking.CONFIG), as_json(config)
    if there and (changed := differences(there, here)):
        raise ConfigError(
            f"config.run.id={config.run.id!r}: {folder} holds a run with other settings ({'; '.join(changed)}); "
            "choose another id, or remove the folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tracking.write_json(folder / tracking.CONFIG, here)
