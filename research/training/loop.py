"""The training loop: every step timed, checked and counted; validation, records and checkpoints when due."""

import functools
import math
import pathlib
import statistics
import time
from typing import Any

import jax
import ml_collections
import rich.console

from research import config as config_lib
from research import data as data_lib
from research import errors, tracking
from research.model import language_model
from research.model import spec as model_spec
from research.training import accuracy, checkpoints, optimizer, report
from research.training import loss as loss_lib
from research.training import step as step_lib

# Rows left out of the medians: the first steps still warm up caches and allocators.
_WARM_UP_ROWS = 2


def train(folder: pathlib.Path, config: ml_collections.ConfigDict, console: rich.console.Console) -> dict[str, Any]:
    """Trains from the newest checkpoint in `folder`, or from the start; returns what the summary is to say of it.

    Raises:
      ConfigError: a setting is impossible.
      NonFiniteLossError: the loss became NaN or infinite; names the step.
    """
    config_lib.validate(config)
    effective = config_lib.effective(config)
    data = _read(config)
    spec = model_spec.from_config(config)
    model, updates = language_model.build(spec), optimizer.build(config)
    state = step_lib.init(spec, updates, config.seed)
    tracking.write_json(folder / tracking.ENVIRONMENT, tracking.environment(data.describe()))
    report.show_run(console, folder, config, state.params, effective)

    saved = checkpoints.Checkpoints(folder / "checkpoints")
    iterator = data.train_iterator()
    done = saved.latest()
    if done:
        state, position = saved.restore(done, state)
        iterator.set_state(position)
        console.print(f"resumed after step {done}")
    tracking.drop_rows_after(folder, done)
    shapes = next(data.validation_batches(1))
    compiled = step_lib.compile_update(step_lib.make_update(model, updates), state, shapes)
    losses = jax.jit(functools.partial(step_lib.losses, model))
    hits = jax.jit(functools.partial(accuracy.hits, model))

    with tracking.Tracker(folder, config) as tracker, report.progress(console, done, config.train.steps) as advance:
        meter = _Meter()
        for step in range(done + 1, config.train.steps + 1):
            start = time.perf_counter()
            batch = next(iterator)
            fetched = time.perf_counter()
            state, metrics = compiled.update(state, batch)
            # Waiting here keeps step times exact, and names the step at which a loss goes wrong.
            row = {name: value.item() for name, value in jax.device_get(metrics).items()}
            meter.add(row["tokens"], fetched - start, time.perf_counter() - fetched)
            _require_finite("loss", row["loss"], step)

            last = step == config.train.steps
            evaluating = last or _due(step, config.train.eval_every)
            if evaluating or _due(step, config.train.log_every):
                row |= {"bits_per_byte": loss_lib.bits_per_byte(row["loss"]), **meter.read()}
                if evaluating:
                    row |= _evaluate(losses, state.params, data, config.train.eval_batches, step)
                    if config.data.task != data_lib.TEXT:
                        batches = data.validation_batches(config.train.eval_batches)
                        row |= accuracy.by_distance(functools.partial(hits, state.params), batches)
                tracker.log(step, row)
            if last or _due(step, config.train.checkpoint_every):
                saved.save(step, state, iterator.get_state())
            advance(row)
        saved.close()
        results = {
            **_outcome(tracking.read_rows(folder)),
            **compiled.cost,
            "parameters": report.count(state.params),
            "requested": config_lib.requested(config),
            "effective": effective,
        }
        tracker.summarize(results)
    return results


def _read(config: ml_collections.ConfigDict) -> data_lib.Data:
    try:
        return data_lib.build(config, config_lib.alignment(config))
    except ValueError as error:  # names the field: what a config points to is seen only when it is read
        raise config_lib.ConfigError(str(error)) from error


def _evaluate(losses, params, data, batches: int, step: int) -> dict[str, float]:
    """Mean loss over the real tokens of the first validation batches."""
    total, count = 0.0, 0
    for batch in data.validation_batches(batches):
        loss, tokens = losses(params, batch)
        total, count = total + loss.item() * tokens.item(), count + tokens.item()
    _require_finite("validation loss", total, step)
    return {"val_loss": total / count, "val_bits_per_byte": loss_lib.bits_per_byte(total / count)}


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _require_finite(name: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise errors.NonFiniteLossError(f"{name} is {value} at step {step}")


class _Meter:
    """Times and tokens since they were last read."""

    def __init__(self):
        self._steps: list[tuple[int, float, float]] = []

    def add(self, tokens: int, fetching: float, stepping: float) -> None:
        self._steps.append((tokens, fetching, stepping))

    def read(self) -> dict[str, float]:
        """Medians in seconds, and the rate over fetching and stepping together; then starts anew."""
        tokens, fetching, stepping = zip(*self._steps, strict=True)
        self._steps = []
        return {
            "data_seconds": statistics.median(fetching),
            "step_seconds": statistics.median(stepping),
            "tokens_per_second": sum(tokens) / (sum(fetching) + sum(stepping)),
        }


def _outcome(rows: list[dict[str, float]]) -> dict[str, float]:
    """Where the losses ended, and the typical speed; the last row has a validation."""
    last, steady = rows[-1], rows[_WARM_UP_ROWS:] or rows
    return {
        "steps": last["step"],
        "final_loss": last["loss"],
        **{name: value for name, value in last.items() if name.startswith("val_")},
        "step_seconds": statistics.median(row["step_seconds"] for row in steady),
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in steady),
    }
