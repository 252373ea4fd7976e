"""A model in training: its state, its data, and the programs that change it. Knows nothing of folders and records."""

import collections
import contextlib
import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from research import data as data_lib
from research import errors
from research.attention.spec import Spec
from research.errors import ConfigError, DamagedError
from research.metrics import Mean
from research.model import feed_forward, language_model
from research.parallel import batch as parallel
from research.runs import checkpoints
from research.runs import source as sources
from research.settings.config import Settings
from research.training import flops, optimizer
from research.training import step as step_lib
from research.training.loss import bits_per_byte
from research.validation import validate


class Step(NamedTuple):
    """What came of an update.

    Attributes:
      row: its metrics.
      tokens: of its batch, without padding.
      data_seconds: to fetch the batch, also while an earlier update ran.
      step_seconds: from its start, or the end of the one before it, to its end.
      seconds: the same with what it had to wait for its batch; those of all steps add up.
    """

    row: dict[str, float]
    tokens: int
    data_seconds: float
    step_seconds: float
    seconds: float


class _Started(NamedTuple):
    """An update that was started: its batch, the iterator's state before that, metrics to come, and two times, s."""

    batch: dict[str, np.ndarray]
    before: dict[str, Any]
    metrics: step_lib.Metrics
    begin: float
    fetched: float


class Trainer:
    """What a config trains, before its first update or where `restore` puts it.

    Attributes:
      spec: the model.
      effective: settings that attention will really use, by kind of layer, and how experts are computed.
      data: the corpus, packed.
      iterator: where training stands in it; every process has the same.
      state: parameters and optimizer, the same on every device.
      done: updates that are known to have made the state; see `started`.
      batch: that of the last update that was waited for.
      nonfinite_batch: the first batch of the last `evaluate` whose measures were not all finite, None if all were.
      cost: of `programs`, and flops_per_token; after `compile`.
    """

    def __init__(self, settings: Settings) -> None:
        """Reads the data and makes the first state.

        Raises:
          ConfigError: a setting is impossible.
          NotImplementedError: a backend cannot serve the request.
        """
        self.spec = validate(settings)
        self.effective = self.spec.effective() | feed_forward.effective(self.spec, jax.device_count())
        self.data = data_lib.build(settings, self.spec.alignment)
        self.iterator, self.batch, self.nonfinite_batch = self.data.train_iterator(), None, None
        self._settings, self._mesh = settings, parallel.mesh(settings)
        self.done, self._free = 0, 0.0
        self._started: collections.deque[_Started] = collections.deque()
        with in_memory(self._settings, "making the first state"):
            sharding = parallel.replicated(self._mesh)
            self.state = step_lib.init(self.spec, optimizer.build(self.spec), settings.seed, sharding)

    def restore(self, done: int, state: step_lib.State, iterator: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.done, self.state = done, state
        self.iterator.set_state(iterator)

    def start_from(self) -> dict[str, Any]:
        """Takes over the parameters and the optimizer's memory of `train.start_from`, at the beginning of the schedule.

        Imported weights have no such memory. Changes nothing in that run's folder.

        Returns:
          What was taken: run, step, and the digest of its arrays.

        Raises:
          ConfigError: the run has not ended well, or has no such checkpoint, or one of another shape.
          DamagedError: the checkpoint is not whole.
        """
        field = f"config.train.start_from={self._settings.train.start_from!r}"
        source = sources.find(field, self._settings.run.root, self._settings.train.start_from)
        like = self.state._replace(opt_state=()) if source.imported else self.state
        try:
            taken = checkpoints.read(source.folder / checkpoints.FOLDER, source.step, like)
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}") from error
        except DamagedError as error:
            told = f"its checkpoint {source.step} is damaged ({error}); ID@STEP names another"
            raise DamagedError(f"{field}: {told}") from error
        opt_state = self.state.opt_state if source.imported else optimizer.restarted(taken.state.opt_state)
        self.state = taken.state._replace(opt_state=opt_state)
        return {"run": str(source.folder), "step": source.step, "digest": taken.digest}

    def compile(self) -> None:
        """Compiles the update and the validation, and learns their `cost`."""
        shapes = parallel.distribute(next(self.data.validation_batches(1)), self._mesh)
        self._update, self._measures, cost = programs(self.spec, self.state, shapes, self._mesh)
        self._go_on()
        self.cost = cost | {"flops_per_token": flops.per_token(self.spec, self.state.params)}

    def _go_on(self) -> None:
        """Lets the next update change the state, whatever came of those before."""
        self._going = jax.device_put(True, parallel.replicated(self._mesh))

    @property
    def started(self) -> int:
        """Updates that were started, `done` ones among them."""
        return self.done + len(self._started)

    def start(self) -> None:
        """Starts the next update, on the next batch, and waits for nothing."""
        before, begin = self.iterator.get_state(), time.perf_counter()
        batch = next(self.iterator)
        fetched = time.perf_counter()
        with in_memory(self._settings, f"step {self.started + 1}"):
            self.state, metrics = self._update(self.state, parallel.distribute(batch, self._mesh), self._going)
        self._going = metrics.pop("going")
        self._started.append(_Started(batch, before, metrics, begin, fetched))

    def finish(self) -> Step:
        """Waits for the first of the updates that were started, and returns what came of it.

        Where its metrics are not all finite, neither it nor those started after it have changed anything: state,
        iterator and `done` are those before it, `batch` is its own.
        """
        this = self._started.popleft()
        with in_memory(self._settings, f"step {self.done + 1}"):
            row = {name: value.item() for name, value in jax.device_get(this.metrics).items()}
        self.batch, end = this.batch, time.perf_counter()
        # It ran from when it was started, or else from when the one before it was done.
        waited = max(0.0, this.fetched - max(self._free, this.begin))
        seconds, self._free = end - max(self._free, this.fetched), end
        if all(map(math.isfinite, row.values())):
            self.done += 1
        else:
            self._started.clear()
            self._go_on()
            self.iterator.set_state(this.before)
        tokens = int((this.batch["segments"] >= 0).sum())
        return Step(self._in_bits(row), tokens, this.fetched - this.begin, seconds, waited + seconds)

    def update(self) -> Step:
        """One update, waited for."""
        self.start()
        return self.finish()

    def evaluate(self, batches: int, before_batch: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Means over the first validation batches: the loss, and the other `step.measures`.

        Args:
          batches: how many.
          before_batch: called before each; what it raises ends the evaluation.
        """
        sums: dict[str, Mean] = {}
        self.nonfinite_batch = None
        with in_memory(self._settings, "validation"):
            for batch in self.data.validation_batches(batches):
                before_batch()
                found = jax.device_get(self._measures(self.state.params, parallel.distribute(batch, self._mesh)))
                for name, mean in found.items():
                    total, count = sums.get(name, Mean(0.0, 0))
                    sums[name] = Mean(total + mean.total.item(), count + mean.count.item())
                if self.nonfinite_batch is None and not all(np.isfinite(mean.total) for mean in found.values()):
                    self.nonfinite_batch = batch
        return self._in_bits({name: mean.total / mean.count for name, mean in sums.items() if mean.count})

    def _in_bits(self, row: dict[str, float]) -> dict[str, float]:
        """Adds the loss in bits per byte, where the data's targets are bytes."""
        return row | ({"bits_per_byte": bits_per_byte(row["loss"])} if self.data.predicts_bytes else {})


def programs(
    spec: Spec, state: step_lib.State, batch: dict[str, jax.Array], mesh: jax.sharding.Mesh
) -> tuple[Callable, Callable, dict[str, Any]]:
    """Compiles what training runs, for these arrays or their shapes.

    Returns:
      The update, see `step.make_update`; `(params, batch) -> step.measures` of all devices; and what both cost: the
      keys of `step.Compiled.cost`, for the second with `eval_` before them.

    Raises:
      MemoryError: the compiler finds too little memory.
    """
    update = step_lib.make_update(spec, language_model.build(spec), optimizer.build(spec), mesh)
    measures = functools.partial(step_lib.measures, language_model.build(spec, measure=True))
    with in_memory(spec.settings, "compiling the step"):
        going = jax.ShapeDtypeStruct((), bool, sharding=parallel.replicated(mesh))
        step = step_lib.compile_program(update, state, batch, going, donated=0)
    with in_memory(spec.settings, "compiling the validation"):
        validation = step_lib.compile_program(parallel.totals(measures, mesh), state.params, batch)
    cost = step.cost | {f"eval_{name}": value for name, value in validation.cost.items()}
    return step.program, validation.program, cost


def in_memory(settings: Settings, doing: str) -> contextlib.AbstractContextManager[None]:
    """`errors.memory_errors` with the settings that decide about memory."""
    sizes = (f"data.batch_size={settings.data.batch_size}", f"data.seq_len={settings.data.seq_len}")
    told = ", ".join(f"config.{setting}" for setting in (*sizes, f"model.remat={settings.model.remat}"))
    return errors.memory_errors(doing, f"too much with {told}")
