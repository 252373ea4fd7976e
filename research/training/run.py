"""A run and its folder: a config is trained once, resumed when killed, and its failure recorded."""

import contextlib
import pathlib
from typing import Any

import rich.console

from research import errors
from research.errors import ConfigError
from research.parallel.agreement import together
from research.runs import files
from research.runs.folder import CONFIG, FINISHED, SUMMARY, is_writer, owned, read_starts
from research.settings import fields
from research.settings.config import Settings
from research.settings.fields import Overrides
from research.training import loop

# What a run may go on with although it differs from what it was started with.
_MAY_CHANGE = tuple(
    f"train.{name}"
    for name in ("steps", "ahead", "log_every", "eval_every", "checkpoint_every", "keep_last", "keep_best")
)


def run(settings: Settings, overrides: Overrides, console: rich.console.Console) -> dict[str, Any]:
    """Trains from the start, or from the newest checkpoint in the run's folder, to the end.

    Args:
      settings: of everything; `run.root` and `run.id` name the folder, `research.runs.folder` says what it holds.
      overrides: how the settings differ from the experiment's; for the record.
      console: where to show the configuration and progress.

    Returns:
      The summary, as in `summary.json`. A run that has finished is not repeated; with more `train.steps` it goes on.

    Raises:
      ConfigError: a setting is impossible, or the folder holds a run with other settings.
      InUseError: another process is at work in the folder, which goes on unharmed.
      DamagedError: a file of the folder is not what was written; nothing was changed.
      NotImplementedError: a backend cannot serve the request.
      What else `loop.train` raises; recorded in `summary.json`, as `errors.kind` names it. What is refused leaves the
        folder as it was, and none where there was none.
    """
    folder = pathlib.Path(settings.run.root) / settings.run.id
    with contextlib.ExitStack() as stack:
        together(lambda: stack.enter_context(owned(folder)) if is_writer() else None)
        summary = together(lambda: _check(folder, settings, console))
        if summary.get("status") == FINISHED and summary["steps"] >= settings.train.steps:
            console.print(f"{folder} is finished, nothing to do", soft_wrap=True)
            return summary
        starts = len(read_starts(folder))
        try:
            results = loop.train(folder, settings, overrides, console)
        except Exception as error:
            refused = isinstance(error, ConfigError | NotImplementedError)
            if not refused or len(read_starts(folder)) > starts:
                _summarize(folder, {"status": errors.kind(error), "message": str(error), "overrides": overrides})
            raise
        summary = {"status": FINISHED, **results, "overrides": overrides}
        if is_writer():
            files.write_json(folder / SUMMARY, summary)
        return summary


def _check(folder: pathlib.Path, settings: Settings, console: rich.console.Console) -> dict[str, Any]:
    """Returns the summary of a run that ended in the folder, else {}; changes nothing.

    Raises:
      ConfigError: the folder is another config's.
    """
    there, here = files.read_json(folder / CONFIG), fields.as_json(settings)
    summary = files.read_json(folder / SUMMARY)
    changed = fields.differences(there, here) if there else []
    if any(not change.startswith(_MAY_CHANGE) for change in changed):
        raise ConfigError(
            f"config.run.id={settings.run.id!r}: {folder} holds a run with other settings ({'; '.join(changed)}); "
            "choose another id, or remove the folder"
        )
    for change in changed:
        console.print(f"goes on with another {change}", soft_wrap=True)
    for name, default in fields.defaults().items() if there else ():
        if fields.compared(name) and name not in fields.flat(there):
            console.print(f"config.{name}: newer than the run; its default {default!r} is assumed", soft_wrap=True)
    return summary


def _summarize(folder: pathlib.Path, summary: dict[str, Any]) -> None:
    if is_writer():
        with contextlib.suppress(OSError):  # a full disk must not hide the error
            files.write_json(folder / SUMMARY, summary)
