"""A model in training: its state, its data, and the programs that change it. Knows nothing of folders and records."""

import contextlib
import functools
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from research import config as config_lib
from research import data as data_lib
from research import errors
from research.errors import ConfigError, DamagedError
from research.model import language_model
from research.model import spec as model_spec
from research.parallel import batch as parallel
from research.runs import checkpoints, files
from research.runs.folder import FINISHED, SUMMARY
from research.training import flops, optimizer
from research.training import step as step_lib


class Trainer:
    """What a config trains, before its first update or where `restore` puts it.

    Attributes:
      spec: the model.
      effective: settings that attention will really use, by kind of layer.
      data: the corpus, packed.
      iterator: where training stands in it; every process has the same.
      state: parameters and optimizer, the same on every device.
      done: updates that made the state.
      batch: the last batch that was taken from the iterator.
      cost: what `step.Compiled` says of the update, and flops_per_token; after `compile`.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        """Reads the data and makes the first state.

        Raises:
          ConfigError: a setting is impossible.
          NotImplementedError: a backend cannot serve the request.
        """
        config_lib.validate(config)
        self.effective = config_lib.effective(config)
        self.spec = model_spec.from_config(config)
        self.data = read_data(config)
        self.iterator, self.batch = self.data.train_iterator(), None
        self._config, self._mesh = config, parallel.mesh(config.data.batch_size)
        self._model, self._optimizer = language_model.build(self.spec), optimizer.build(config)
        self.done = 0
        with in_memory(self._config, "making the first state"):
            self.state = step_lib.init(self.spec, self._optimizer, config.seed, parallel.replicated(self._mesh))

    def restore(self, done: int, state: step_lib.State, iterator: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.done, self.state = done, state
        self.iterator.set_state(iterator)

    def start_from(self) -> dict[str, Any]:
        """Takes over the parameters and the optimizer's memory of `train.start_from`, at the beginning of the schedule.

        Changes nothing in that run's folder.

        Returns:
          What was taken: run, step, and the digest of its arrays.

        Raises:
          ConfigError: the run has not ended well, or has no such checkpoint, or one of another shape.
          DamagedError: the checkpoint is not whole.
        """
        source = self._config.train.start_from
        field = f"config.train.start_from={source!r}"
        name, _, number = source.rpartition("@") if re.search(r"@\d+$", source) else (source, "", "")
        folder = pathlib.Path(self._config.run.root) / name
        status = files.read_json(folder / SUMMARY).get("status", "unfinished, or no run")
        if status != FINISHED:
            raise ConfigError(f"{field}: {folder} is {status}; must be a run that ended well, by its id or path")
        found = checkpoints.steps(folder / checkpoints.FOLDER)
        step = int(number) if number else max(found, default=0)
        if step not in found:
            raise ConfigError(f"{field}: {folder} has no checkpoint {step}; must be ID@STEP, a step of {found[::-1]}")
        try:
            taken = checkpoints.read(folder / checkpoints.FOLDER, step, self.state)
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}") from error
        except DamagedError as error:
            raise DamagedError(f"{field}: its checkpoint {step} is damaged ({error}); ID@STEP names another") from error
        self.state = taken.state._replace(opt_state=optimizer.restarted(taken.state.opt_state))
        return {"run": str(folder), "step": step, "digest": taken.digest}

    def compile(self) -> None:
        """Compiles the update, and learns its `cost`."""
        shapes = parallel.distribute(next(self.data.validation_batches(1)), self._mesh)
        update = step_lib.make_update(self._model, self._optimizer, self.spec.attention, self._mesh)
        with in_memory(self._config, "compiling the step"):
            compiled = step_lib.compile_update(update, self.state, shapes)
        flops_per_token = flops.per_token(self.spec, self._config.data.seq_len, self.state.params)
        self._update, self.cost = compiled.update, compiled.cost | {"flops_per_token": flops_per_token}
        measuring = language_model.build(self.spec, measure=True)
        self._measures = jax.jit(parallel.mean(functools.partial(step_lib.measures, measuring), self._mesh))

    def update(self) -> tuple[dict[str, float], float, float]:
        """One update; returns its metrics, and the seconds spent on fetching the batch and on the step.

        Where the metrics are not all finite, the state is still the one before.
        """
        start = time.perf_counter()
        self.batch = next(self.iterator)
        fetched = time.perf_counter()
        with in_memory(self._config, f"step {self.done + 1}"):
            self.state, metrics = self._update(self.state, parallel.distribute(self.batch, self._mesh))
            # Waiting here keeps step times exact, and names the step at which a loss goes wrong.
            row = {name: value.item() for name, value in jax.device_get(metrics).items()}
        self.done += 1
        return row, fetched - start, time.perf_counter() - fetched

    def evaluate(self, batches: int, between: Callable[[], None]) -> dict[str, float]:
        """Means over the first validation batches: the loss, and the other `step.measures`.

        `between()` is called before each of them, and may raise.
        """
        total, count, others = 0.0, 0, []
        with in_memory(self._config, "validation"):
            for batch in self.data.validation_batches(batches):
                between()
                found = self._measures(self.state.params, parallel.distribute(batch, self._mesh))
                loss, tokens, of_batch = jax.device_get(found)
                total, count = total + loss.item() * tokens.item(), count + tokens.item()
                others.append(of_batch)
        means = {"loss": total / count}
        for name, mean in jax.tree.map(lambda *x: sum(leaf.item() for leaf in x), *others).items():
            if mean.count:
                means[name] = mean.total / mean.count
        return means


def in_memory(config: ml_collections.ConfigDict, doing: str) -> contextlib.AbstractContextManager[None]:
    """`errors.of_memory` with the settings that decide about memory."""
    sizes = (f"data.batch_size={config.data.batch_size}", f"data.seq_len={config.data.seq_len}")
    settings = ", ".join(f"config.{setting}" for setting in (*sizes, f"model.remat={config.model.remat}"))
    return errors.of_memory(doing, f"too much with {settings}")


def read_data(config: ml_collections.ConfigDict) -> data_lib.Data:
    """The data of a config; what `data.path` points to is seen only here, and refused as a ConfigError."""
    try:
        return data_lib.build(config, config_lib.alignment(config))
    except ValueError as error:
        raise config_lib.ConfigError(str(error)) from error
