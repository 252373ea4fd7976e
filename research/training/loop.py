"""The training loop: every step timed, checked and counted; validation, records and checkpoints when due."""

import math
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import rich.console
from jax.experimental import multihost_utils

from research import errors
from research.errors import ConfigError
from research.parallel.agreement import together
from research.runs import checkpoints, tracking
from research.runs import folder as folder_lib
from research.settings.config import WARM_UP_STEPS, Settings
from research.settings.fields import Overrides
from research.training import flops, inspection, profile, report
from research.training.interruption import Interruption
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
        say(f"run folder: {folder}")
        restored = checkpoints.newest(folder / checkpoints.FOLDER, trainer.state, say)
        source = {}
        if restored:
            trainer.restore(restored.step, restored.state, restored.iterator)
            say(f"resumed after step {trainer.done}")
        elif settings.train.start_from:
            source = together(trainer.start_from)
        together(lambda: _record_start(folder, settings, overrides, trainer, restored, source, say))
        run = _Run(folder, settings, trainer, interruption)
        with tracking.Tracker(folder, settings, say) as tracker:
            together(tracker.ready)
            run.stop_if_asked()
            trainer.compile()
            run.stop_if_asked()
            writer = checkpoints.Writer(folder / checkpoints.FOLDER, settings.train.keep_last, settings.train.keep_best)
            with writer, report.progress(console, trainer.done, settings.train.steps) as advance:
                run.steps(writer, tracker, restored.row if restored else {}, advance)
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
    for change in folder_lib.changes(before, here) if done else ():
        say(f"goes on under another {change}")
    if folder_lib.is_writer():
        if line := folder_lib.start_rows(folder, done, restored is not None):
            say(line)
        folder_lib.record_start(folder, here | ({"started_from": source} if source else {}))


def _started_from(folder: pathlib.Path) -> dict[str, Any]:
    """What another run's checkpoint the run began with, if any."""
    found = [start["started_from"] for start in folder_lib.read_starts(folder) if "started_from" in start]
    return {"started_from": found[-1]} if found else {}


class _Run:
    """The steps of a run, and where it stands with saving them."""

    def __init__(self, folder: pathlib.Path, settings: Settings, trainer: Trainer, interruption: Interruption) -> None:
        self._folder, self._settings, self._trainer, self._interruption = folder, settings, trainer, interruption
        self._saved = trainer.done

    def stop_if_asked(self, save: Callable[[], None] = lambda: None) -> None:
        """Raises InterruptedRunError after a signal; `save()` first, where steps are done that are not saved."""
        if not (signal := self._interruption.received()):
            return
        done, steps = self._trainer.done, self._settings.train.steps
        if done > self._saved:
            save()
        what = (
            f"after step {done} of {steps}, which is saved" if done else "before the first step, nothing is saved yet"
        )
        raise errors.InterruptedRunError(
            f"{signal} {what}; start again with --config.run.id={self._settings.run.id} to go on"
        )

    def steps(
        self, writer: checkpoints.Writer, tracker: tracking.Tracker, pending: dict[str, Any], advance: Callable
    ) -> None:
        """The steps that are left; `pending` is what the last one done has still to log."""
        settings, trainer = self._settings, self._trainer
        rows = folder_lib.read_rows(self._folder)
        writer.validated({row["step"]: row["val_loss"] for row in rows if "val_loss" in row})
        if pending and trainer.done not in {row["step"] for row in rows}:
            self._log(writer, tracker, trainer.done, pending)
        meter = _Meter(trainer.cost["flops_per_token"])
        first_traced = trainer.done + 1 + WARM_UP_STEPS
        with profile.Profiler(self._folder / profile.FOLDER, first_traced, settings.profile.steps) as profiler:
            for step in range(trainer.done + 1, settings.train.steps + 1):
                self.stop_if_asked(lambda: self._save(writer, {}))
                with profiler.step(step):
                    row, fetching, stepping = trainer.update()
                meter.add(int((trainer.batch["segments"] >= 0).sum()), fetching, stepping)
                _require_finite(row, step, self._folder, trainer)

                logged = self._validates(step) or _due(step, settings.train.log_every)
                if logged:
                    row |= meter.read()
                if step == settings.train.steps or _due(step, settings.train.checkpoint_every):
                    # Before validation, which may fail or be stopped and only measures.
                    self._save(writer, row if logged else {})
                if logged:
                    row = self._log(writer, tracker, step, row)
                advance(row)

    def _validates(self, step: int) -> bool:
        return step == self._settings.train.steps or _due(step, self._settings.train.eval_every)

    def _save(self, writer: checkpoints.Writer, pending: dict[str, Any]) -> None:
        trainer = self._trainer
        writer.save(trainer.done, trainer.state, trainer.iterator.get_state(), pending)
        self._saved = trainer.done

    def _log(self, writer: checkpoints.Writer, tracker: tracking.Tracker, step: int, row: dict) -> dict[str, Any]:
        """Logs a row, with the step's validation if that is due."""
        if self._validates(step):

            def stop() -> None:
                self.stop_if_asked(lambda: self._save(writer, row))

            found = self._trainer.evaluate(self._settings.train.eval_batches, stop)
            row = row | {f"val_{name}": value for name, value in found.items()}
            _require_finite(row, step, self._folder, self._trainer)
            writer.validated({step: row["val_loss"]})
        tracker.log(step, row)
        return row


def _require_finite(row: dict[str, float], step: int, folder: pathlib.Path, trainer: Trainer) -> None:
    """Raises NonFiniteLossError where a number of the row is not finite, having kept what led there."""
    for name in ("loss", "grad_norm", *row):  # where several are not, the loss is what is told of
        if not math.isfinite(value := row.get(name, 0.0)):
            try:
                where = inspection.keep(folder, trainer, validating=name.startswith("val_"))
            except OSError as error:
                where = f"its state and batch could not be kept: {error}"
            raise errors.NonFiniteLossError(f"{name} is {value} at step {step}; {where}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _Meter:
    """Times and tokens since they were last read."""

    def __init__(self, flops_per_token: float) -> None:
        self._flops_per_token = flops_per_token
        self._steps: list[tuple[int, float, float]] = []

    def add(self, tokens: int, fetching: float, stepping: float) -> None:
        self._steps.append((tokens, fetching, stepping))

    def read(self) -> dict[str, float]:
        """Medians in seconds, and the rate over fetching and stepping together; then starts anew."""
        tokens, fetching, stepping = zip(*self._steps, strict=True)
        self._steps = []
        rate = sum(tokens) / (sum(fetching) + sum(stepping))
        return {
            "data_seconds": statistics.median(fetching),
            "step_seconds": statistics.median(stepping),
            "tokens_per_second": rate,
            **flops.utilisation(rate * self._flops_per_token),
        }


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
