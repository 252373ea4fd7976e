"""What a launcher prints to: a reader that goes away, or an encoding that lacks a letter, ends no run."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


def make_patient() -> None:
    """Wraps this process's stdout and stderr; letters that their encodings lack become question marks."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")
    sys.stderr = _Patient(sys.stderr, "")
    sys.stdout = _Patient(sys.stdout, "output: its reader has gone; the work goes on, and its files tell the rest")


class _Patient:
    """A text stream that, once its reader has gone, swallows what is written."""

    def __init__(self, stream: TextIO, notice: str) -> None:
        self._stream, self._notice = stream, notice

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._until_closed():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._until_closed():
            self._stream.flush()

    @contextlib.contextmanager
    def _until_closed(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # also for what the stream still holds
            os.close(nowhere)
            if self._notice:
                print(self._notice, file=sys.stderr, flush=True)
        except OSError as error:
            error.filename = self._stream.name
            raise
