"""What a row of metrics says beside the losses: learning rate, tokens, epoch, times, rates and memory."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from research.settings.config import Settings
from research.training import flops, optimizer, profile
from research.training.trainer import Step


class Meter:
    """Counts the updates of a run, those of earlier starts among them."""

    def __init__(self, settings: Settings, totals: dict[str, float], epoch_tokens: int, flops_per_token: float) -> None:
        """Goes on from `totals`, those of a checkpoint; empty where an older version left none.

        Args:
          settings: of everything.
          totals: tokens and seconds of the updates before.
          epoch_tokens: of the training documents, 0 where they never repeat.
          flops_per_token: of training.
        """
        self._before, self._epoch_tokens, self._flops_per_token = totals, epoch_tokens, flops_per_token
        # Of all updates at once: computed for one row, it would wait for the update that runs.
        self._learning_rates = np.asarray(jax.vmap(optimizer.learning_rate(settings))(jnp.arange(settings.train.steps)))
        self._tokens, self._begin = 0, time.monotonic()
        self._steps: list[Step] = []

    def add(self, step: Step) -> None:
        """Counts an update."""
        self._tokens += step.tokens
        self._steps.append(step)

    def totals(self) -> dict[str, float]:
        """Of all updates: tokens without padding, and seconds with validations; empty if those before are unknown."""
        if not self._before:
            return {}
        seconds = time.monotonic() - self._begin
        return {"tokens": self._before["tokens"] + self._tokens, "seconds": self._before["seconds"] + seconds}

    def read(self, step: int) -> dict[str, float]:
        """What is to be said of the update of that number, and of those since the last reading.

        Returns:
          learning_rate: of this update.
          tokens_seen, elapsed_seconds: see `totals`; epoch: tokens_seen by those of the training documents.
          data_seconds, step_seconds: medians; data_seconds also counts what was fetched while an update ran.
          tokens_per_second: with what updates waited for their batches.
          mfu, where the chip's peak is known; see `flops.utilisation`.
          peak_host_bytes, and peak_device_bytes where the platform counts them.
        """
        steps, self._steps = self._steps, []
        rate = sum(step.tokens for step in steps) / sum(step.seconds for step in steps)
        found = {"learning_rate": self._learning_rates[step - 1].item()}
        if totals := self.totals():
            found |= {"tokens_seen": totals["tokens"], "elapsed_seconds": totals["seconds"]}
            if self._epoch_tokens:
                found["epoch"] = totals["tokens"] / self._epoch_tokens
        return found | {
            "data_seconds": statistics.median(step.data_seconds for step in steps),
            "step_seconds": statistics.median(step.step_seconds for step in steps),
            "tokens_per_second": rate,
            **flops.utilisation(rate * self._flops_per_token),
            **profile.peak_memory(),
        }
