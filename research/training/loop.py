"""The training loop: every step timed, checked and counted; validation, records and checkpoints when due."""

import math
import pathlib
import statistics
from typing import Any, NoReturn

import ml_collections
import rich.console
from jax.experimental import multihost_utils

from research import config as config_lib
from research import errors, tracking
from research.config import ConfigError
from research.training import flops, inspection, profile, report
from research.training.checkpoints import FOLDER, Checkpoints
from research.training.interruption import Interruption
from research.training.trainer import Trainer


def train(folder: pathlib.Path, config: ml_collections.ConfigDict, console: rich.console.Console) -> dict[str, Any]:
    """Trains from the newest checkpoint in `folder`, or from the start; returns what the summary is to say of it.

    Raises:
      ConfigError: a setting is impossible, or not what the checkpoints were made with.
      NonFiniteLossError: loss or gradient became NaN or infinite; names the step, and where its state and batch are.
      MemoryError: the step does not fit the memory.
      OSError: something could not be written.
      InterruptedRunError: SIGTERM or SIGINT came; all steps done are saved.
    """
    trainer = Trainer(config)
    report.show_run(console, config, trainer.state.params, trainer.effective)
    console.print(f"run folder: {folder}", soft_wrap=True)
    kept = Checkpoints(folder / FOLDER, config.train.keep_last, config.train.keep_best)
    with Interruption() as interruption, kept as checkpoints:
        if restored := checkpoints.restore(trainer.state):
            trainer.restore(*restored)
            console.print(f"resumed after step {trainer.done}")
        elif config.train.start_from:
            trainer.start_from(pathlib.Path(config.run.root) / config.train.start_from)
        _record_start(folder, config, trainer)
        trainer.compile()
        with tracking.Tracker(folder, config) as tracker:
            with report.progress(console, trainer.done, config.train.steps) as advance:
                _steps(folder, config, trainer, checkpoints, tracker, interruption, advance)
            checkpoints.wait()
            multihost_utils.sync_global_devices("all is recorded")
            results = {
                **_outcome(tracking.read_rows(folder)),
                **trainer.cost,
                **profile.peak_memory(),
                "parameters": report.count(trainer.state.params),
                "requested": config_lib.requested(config),
                "effective": trainer.effective,
            }
            tracker.summarize(results)
    return results


def _record_start(folder: pathlib.Path, config: ml_collections.ConfigDict, trainer: Trainer) -> None:
    """Makes the records those of a run that has done `trainer.done` steps, or raises ConfigError."""
    done, rows = trainer.done, tracking.read_rows(folder)
    ended = any(row["step"] == done and "val_loss" in row for row in rows)
    if done > config.train.steps or (done == config.train.steps and not ended):
        raise ConfigError(f"config.train.steps={config.train.steps}: must be more than the {done} that are done")
    corpus = trainer.data.describe()
    before = tracking.read_json(folder / tracking.ENVIRONMENT).get("corpus", {})
    if done and before.get("digest") != corpus["digest"]:
        raise ConfigError(
            f"config.data.path={config.data.path!r}: is not the text that the run was started with "
            f"({before or 'unknown'} there, {corpus} here)"
        )
    tracking.write_json(folder / tracking.ENVIRONMENT, tracking.environment(corpus))
    tracking.drop_rows_after(folder, done)


def _steps(folder, config, trainer, checkpoints, tracker, interruption, advance) -> None:
    """The steps that are left."""
    meter, saved = _Meter(trainer.cost["flops_per_token"]), trainer.done
    first_traced = trainer.done + 1 + config_lib.WARM_UP_STEPS
    with profile.Profiler(folder / profile.FOLDER, first_traced, config.profile.steps) as profiler:
        for step in range(trainer.done + 1, config.train.steps + 1):
            if signal := interruption.received():
                _stop(signal, config, trainer, checkpoints, saved)
            with profiler.step(step):
                row, fetching, stepping = trainer.update()
            meter.add(int((trainer.batch["segments"] >= 0).sum()), fetching, stepping)
            _require_finite(row, step, folder, trainer)

            last = step == config.train.steps
            evaluating = last or _due(step, config.train.eval_every)
            if evaluating or _due(step, config.train.log_every):
                row |= meter.read()
                if evaluating:
                    row |= {f"val_{name}": value for name, value in trainer.evaluate(config.train.eval_batches).items()}
                    _require_finite(row, step, folder, trainer)
                tracker.log(step, row)
            if last or _due(step, config.train.checkpoint_every):
                checkpoints.save(step, trainer.state, trainer.iterator.get_state(), row.get("val_loss"))
                saved = step
            advance(row)


def _stop(signal: str, config, trainer: Trainer, checkpoints: Checkpoints, saved: int) -> NoReturn:
    if trainer.done > saved:
        checkpoints.save(trainer.done, trainer.state, trainer.iterator.get_state())
    checkpoints.wait()
    raise errors.InterruptedRunError(
        f"{signal} after step {trainer.done} of {config.train.steps}, which is saved; "
        f"start again with --config.run.id={config.run.id} to go on"
    )


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

    def __init__(self, flops_per_token: float):
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
    last, steady = rows[-1], rows[config_lib.WARM_UP_STEPS :] or rows
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
