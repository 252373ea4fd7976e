"""A model in training: its state, its data, and the programs that change it. Knows nothing of folders and records."""

import contextlib
import functools
import pathlib
import time
from typing import Any

import jax
import ml_collections

from research import config as config_lib
from research import data as data_lib
from research import errors
from research.config import ConfigError
from research.model import language_model
from research.model import spec as model_spec
from research.parallel import batch as parallel
from research.training import flops, optimizer
from research.training import step as step_lib
from research.training.checkpoints import newest


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

    def start_from(self, folder: pathlib.Path) -> None:
        """Takes over the parameters and the optimizer's memory of another run, at the beginning of the schedule.

        Raises:
          ConfigError: the folder holds no checkpoint that is whole, or one of another shape.
        """
        field = f"config.train.start_from={self._config.train.start_from!r}"
        try:
            state = newest(folder, self.state)
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}") from error
        if state is None:
            raise ConfigError(
                f"{field}: {folder} holds no checkpoint; must be the id of a run in the same run.root, or its path"
            )
        self.state = state._replace(opt_state=optimizer.restarted(state.opt_state))

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

    def evaluate(self, batches: int) -> dict[str, float]:
        """Means over the first validation batches: the loss, and the other `step.measures`."""
        total, count, others = 0.0, 0, []
        with in_memory(self._config, "validation"):
            for batch in self.data.validation_batches(batches):
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
