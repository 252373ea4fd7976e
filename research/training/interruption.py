"""SIGTERM and SIGINT as a request to stop after the running step."""

import signal
import threading
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils


class Interruption:
    """Within it, the first signal is noted, and a second one of the same kind does what it does otherwise.

    In another thread than the main one, where Python allows no handlers, signals do what they do otherwise.
    """

    def __enter__(self):
        self._received = 0
        main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGTERM, signal.SIGINT) if main else ()
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, kind, error, traceback):
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
        self._received = number
        signal.signal(number, self._before[number])
