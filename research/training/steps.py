"""The training loop: every step timed, checked and counted; validation, records and checkpoints when due."""

import math
import pathlib
from collections.abc import Callable
from typing import Any, NoReturn

from research import errors
from research.runs import checkpoints, tracking
from research.runs import folder as folder_lib
from research.settings.config import WARM_UP_STEPS, Settings
from research.training import inspection, profile
from research.training.interruption import Interruption
from research.training.meter import Meter
from research.training.trainer import Trainer


class Steps:
    """The steps of a run, and where it stands with saving them."""

    def __init__(self, folder: pathlib.Path, settings: Settings, trainer: Trainer, interruption: Interruption) -> None:
        self._folder, self._settings, self._trainer, self._interruption = folder, settings, trainer, interruption
        self._saved = trainer.done

    def stop_if_asked(self, save: Callable[[], None] = lambda: None) -> None:
        """Raises InterruptedRunError after a signal; `save()` first, where steps are done that are not saved."""
        if signal := self._interruption.received():
            self._stop(signal, save)

    def _stop(self, signal: str, save: Callable[[], None]) -> NoReturn:
        done, steps = self._trainer.done, self._settings.train.steps
        if done > self._saved:
            save()
        what = (
            f"after step {done} of {steps}, which is saved" if done else "before the first step, nothing is saved yet"
        )
        raise errors.InterruptedRunError(
            f"{signal} {what}; start again with --config.run.id={self._settings.run.id} to go on"
        )

    def run(
        self,
        writer: checkpoints.Writer,
        tracker: tracking.Tracker,
        restored: checkpoints.Restored | None,
        advance: Callable,
    ) -> None:
        """The steps that are left, and what the last one that was done has still to log."""
        settings, trainer = self._settings, self._trainer
        rows = folder_lib.read_rows(self._folder)
        writer.validated({row["step"]: row["val_loss"] for row in rows if "val_loss" in row})
        if restored and restored.row and trainer.done not in {row["step"] for row in rows}:
            self._log(writer, tracker, trainer.done, restored.row)
        totals = {"tokens": 0, "seconds": 0.0} if restored is None else restored.totals
        self._meter = meter = Meter(settings, totals, trainer.data.epoch_tokens, trainer.cost["flops_per_token"])
        first_traced = trainer.done + 1 + WARM_UP_STEPS
        with profile.Profiler(self._folder / profile.FOLDER, first_traced, settings.profile.steps) as profiler:
            while trainer.done < settings.train.steps:
                signal = self._interruption.received()
                if signal and trainer.started == trainer.done:
                    self._stop(signal, lambda: self._save(writer, {}))
                step = trainer.done + 1
                with profiler.step(step):
                    while not signal and trainer.started < self._start_until(step):
                        trainer.start()
                    found = trainer.finish()
                row = found.row
                require_finite(row, step, self._folder, trainer)
                meter.add(found)

                logged = self._validates(step) or _due(step, settings.train.log_every)
                if logged:
                    row |= meter.read(step)
                if self._checkpoints(step):
                    # Before validation, which may fail or be stopped and only measures.
                    self._save(writer, row if logged else {})
                if logged:
                    row = self._log(writer, tracker, step, row)
                advance(row)

    def _start_until(self, step: int) -> int:
        """Up to which update may be started while this one is not done.

        Not beyond one whose state is needed, nor, for their times' sake, beyond this one where steps are traced.
        """
        ahead = 0 if self._settings.profile.steps else self._settings.train.ahead
        for last in range(step, step + ahead):
            if self._validates(last) or self._checkpoints(last):
                return last
        return step + ahead

    def _validates(self, step: int) -> bool:
        return step == self._settings.train.steps or _due(step, self._settings.train.eval_every)

    def _checkpoints(self, step: int) -> bool:
        return step == self._settings.train.steps or _due(step, self._settings.train.checkpoint_every)

    def _save(self, writer: checkpoints.Writer, pending: dict[str, Any]) -> None:
        trainer = self._trainer
        writer.save(trainer.done, trainer.state, trainer.iterator.get_state(), pending, self._meter.totals())
        self._saved = trainer.done

    def _log(self, writer: checkpoints.Writer, tracker: tracking.Tracker, step: int, row: dict) -> dict[str, Any]:
        """Logs a row, with the step's validation if that is due."""
        if self._validates(step):

            def stop() -> None:
                self.stop_if_asked(lambda: self._save(writer, row))

            found = self._trainer.evaluate(self._settings.train.eval_batches, stop)
            row = row | {f"val_{name}": value for name, value in found.items()}
            require_finite(row, step, self._folder, self._trainer)
            writer.validated({step: row["val_loss"]})
        tracker.log(step, row)
        return row


def require_finite(row: dict[str, float], step: int, folder: pathlib.Path, trainer: Trainer) -> None:
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
