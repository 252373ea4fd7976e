"""A training: the trainer and its records made ready, the steps run, the outcome summed up."""

import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import rich.console
from jax.experimental import multihost_utils

from research import errors, validation
from research.errors import ConfigError
from research.parallel.agreement import together
from research.runs import checkpoints, files, tracking
from research.runs import folder as folder_lib
from research.settings import fields
from research.settings.config import WARM_UP_STEPS, Settings
from research.settings.fields import Overrides
from research.training import profile, report
from research.training.interruption import Interruption
from research.training.steps import Steps
from research.training.trainer import Trainer


def train(
    folder: pathlib.Path, settings: Settings, overrides: Overrides, console: rich.console.Console
) -> dict[str, Any]:
    """Trains from the newest checkpoint in `folder`, or from the start; returns what the summary is to say of it.

    To be called by the folder's owner.

    Raises:
      ConfigError: a setting is impossible, or not what the checkpoints were made with.
      DamagedError: there are checkpoints, and none is whole.
      NonFiniteLossError: loss or gradient became NaN or infinite; names the step, and where its state and batch are.
      MemoryError: the step does not fit the memory.
      OSError: something could not be read or written.
      InterruptedRunError: a signal asked for it; all steps done are saved.
    """

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    with Interruption() as interruption:
        trainer = together(lambda: Trainer(settings))
        report.show_run(console, settings, trainer.state.params, trainer.effective)
        for note in validation.notes(trainer.spec):
            say(f"warning: {note}")
        say(f"run folder: {folder}")
        restored = checkpoints.newest(folder / checkpoints.FOLDER, trainer.state, say)
        source = {}
        if restored:
            trainer.restore(restored.step, restored.state, restored.iterator)
            say(f"resumed after step {trainer.done}")
        elif settings.train.start_from:
            source = together(trainer.start_from)
        together(lambda: _record_start(folder, settings, overrides, trainer, restored, source, say))
        steps = Steps(folder, settings, trainer, interruption)
        with tracking.Tracker(folder, settings, say) as tracker:
            together(tracker.ready)
            steps.stop_if_asked()
            trainer.compile()
            steps.stop_if_asked()
            writer = checkpoints.Writer(folder / checkpoints.FOLDER, settings.train.keep_last, settings.train.keep_best)
            with writer, report.progress(console, trainer.done, settings.train.steps) as advance:
                steps.run(writer, tracker, restored, advance)
                writer.wait()
            multihost_utils.sync_global_devices("all is recorded")
            results = {
                **_outcome(folder_lib.read_rows(folder)),
                **trainer.cost,
                **profile.peak_memory(),
                "parameters": report.count(trainer.state.params),
                "requested": settings.attention.requested(),
                "effective": trainer.effective,
                **_started_from(folder),
            }
            tracker.summarize(results)
    return results


def _record_start(
    folder: pathlib.Path,
    settings: Settings,
    overrides: Overrides,
    trainer: Trainer,
    restored: checkpoints.Restored | None,
    source: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """Makes the records those of a run that has done `trainer.done` steps, or raises ConfigError."""
    done, rows = trainer.done, folder_lib.read_rows(folder)
    pending = bool(restored and restored.row)
    ended = pending or any(row["step"] == done and "val_loss" in row for row in rows)
    if done > settings.train.steps or (done == settings.train.steps and not ended):
        raise settings.train.error("steps", f"more than the {done} that are done")
    starts, corpus = folder_lib.read_starts(folder), trainer.data.describe()
    if not done and any(start.get("resumed_after") for start in starts):
        raise errors.DamagedError(
            f"{folder}: its checkpoints, from which it was resumed, are gone; put one back, or choose another run.id"
        )
    before = starts[-1] if starts else {}
    if done and before.get("corpus", {}).get("digest") != corpus["digest"]:
        raise ConfigError(
            f"config.data.path={settings.data.path!r}: is not the text that the run was started with "
            f"({before.get('corpus') or 'unknown'} there, {corpus} here)"
        )
    here = folder_lib.environment() | {"corpus": corpus, "overrides": overrides, "resumed_after": done}
    here["notes"] = validation.notes(trainer.spec)
    for change in folder_lib.changes(before, here) if done else ():
        say(f"goes on under another {change}")
    if folder_lib.is_writer():
        files.write_json(folder / folder_lib.CONFIG, fields.as_json(settings))
        (folder / folder_lib.SUMMARY).unlink(missing_ok=True)  # how an earlier start ended
        if line := folder_lib.start_rows(folder, done, restored is not None):
            say(line)
        folder_lib.record_start(folder, here | ({"started_from": source} if source else {}))


def _started_from(folder: pathlib.Path) -> dict[str, Any]:
    """What another run's checkpoint the run began with, if any."""
    found = [start["started_from"] for start in folder_lib.read_starts(folder) if "started_from" in start]
    return {"started_from": found[-1]} if found else {}


def _outcome(rows: list[dict[str, float]]) -> dict[str, float]:
    """Where the losses ended, and the typical speed; the last row has a validation."""
    last, steady = rows[-1], rows[WARM_UP_STEPS:] or rows
    typical = {
        # Where the rows are of several devices' kinds, some may lack a number: mfu is told of known chips only.
        name: statistics.median(row[name] for row in steady if name in row)
        for name in ("step_seconds", "tokens_per_second", "mfu")
        if any(name in row for row in steady)
    }
    return {
        "steps": last["step"],
        "final_loss": last["loss"],
        **{name: value for name, value in last.items() if name.startswith("val_")},
        **typical,
    }
