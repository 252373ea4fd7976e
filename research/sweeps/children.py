"""Processes that are started here: told to stop when we are, and gone when we are.

Every process gets a session of its own, so that Ctrl-C reaches it through us alone, once. Where this process is killed
outright, Linux sends SIGTERM to what it started, which then saves its step and ends; other systems do not.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Self

from research import exits

# Started in the place of a command, which it becomes: asks Linux for a SIGTERM when the parent dies, unless it has died
# by now. Asking between fork and exec instead would run Python in the copy of a process that has threads.
_BOUND = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(75)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Children:
    """Within it, the first stop signal is passed on to all processes as SIGTERM, and a second one kills them.

    That is the same signal, `exits.AGAIN_SECONDS` or more after the first, which then also does here what it does
    otherwise; another signal is taken for the same request. Signals that are ignored stay so. In another thread than
    the main one, where Python allows no handlers, signals do what they do otherwise. When an exception leaves it, the
    processes are told to stop, and waited for.
    """

    def __init__(self, patient: bool = False) -> None:
        """`patient`: a second signal is passed over, for whoever sends it kills by itself what lasts too long."""
        self._patient = patient
        self._running: dict[subprocess.Popen, bool] = {}  # and whether it was told to stop
        self._lock = threading.RLock()  # a handler runs amid what its thread does
        self._stopped = ""
        self._first: dict[int, float] = {}  # when each signal came first, s

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._note) for number in (exits.heeded() if main else ())}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.stop(kind.__name__)
            for process in list(self._running):
                process.wait()
        self._restore()

    @property
    def stopped(self) -> str:
        """Why no more is to be started, a signal's name for one; '' where nothing speaks against it."""
        return self._stopped

    def run(self, command: Sequence[str], log: pathlib.Path) -> int:
        """Runs a command to its end, its output appended to a file; returns its exit code, as `subprocess` does.

        To be called from any thread, which must live as long as the command does. After a stop signal nothing is
        started, as if it had been ended at once.
        """
        if self._stopped:
            return -signal.SIGTERM
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *command]
        with open(log, "ab") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        with self._lock:
            self._running[process] = False
            if self._stopped:  # while it was started
                self._tell()
        try:
            return process.wait()
        finally:
            with self._lock:
                self._running.pop(process)

    def stop(self, why: str) -> None:
        """Tells all processes to stop, and those still to be started."""
        with self._lock:
            self._stopped = self._stopped or why
            self._tell()

    def _tell(self) -> None:
        """Sends SIGTERM, once to each."""
        for process, told in list(self._running.items()):
            if not told:
                self._running[process] = True
                process.terminate()

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        name, now = signal.Signals(number).name, time.monotonic()
        if not self._stopped:
            # Not printed: the signal may have come amid a print.
            kills = "" if self._patient else f"; a second {name} kills it"
            os.write(2, f"{name}: what runs saves its step and ends{kills}\n".encode())
            self.stop(name)
        if now - self._first.setdefault(number, now) > exits.AGAIN_SECONDS and not self._patient:
            for process in list(self._running):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
