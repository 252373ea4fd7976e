"""Signals as a request to stop after the running step: Ctrl-C, and what schedulers send before they kill."""

import signal
import threading
import time
from types import FrameType
from typing import Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from research import exits


class Interruption:
    """Within it, the first signal is noted, and later ones of the same request too.

    One that comes more than `exits.AGAIN_SECONDS` later is a new request, and does what it does otherwise. Signals that
    are ignored stay so. In another thread than the main one, where Python allows no handlers, signals do what they do
    otherwise.
    """

    def __enter__(self) -> Self:
        self._received, self._at = 0, 0.0
        main = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._note) for number in (exits.heeded() if main else ())}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def received(self) -> str:
        """The signal's name, '' where there was none; the same in all processes, all of which must ask."""
        number = self._received
        if jax.process_count() > 1:  # the scheduler may have told one of them, or some of them a step later
            number = int(multihost_utils.process_allgather(np.int32(number)).max())
        return signal.Signals(number).name if number else ""

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if not self._received:
            self._received, self._at = number, now
        elif now - self._at > exits.AGAIN_SECONDS:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
