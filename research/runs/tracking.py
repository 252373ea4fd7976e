"""What a run records of its steps: JSON lines always, and through `mirror` the same numbers and names in wandb.

A row goes to `metrics.jsonl` first. wandb runs in a process of its own: it may fail, hang or be killed, which costs one
warning. Of several processes the first alone writes.
"""

import contextlib
import json
import pathlib
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, Self

from research import errors
from research.errors import ConfigError
from research.runs import files, login
from research.runs.folder import METRICS, is_writer
from research.settings import fields
from research.settings.config import Settings

_PROGRAM = "research.runs.mirror"
_START_SECONDS = 60.0  # for wandb to be there; it gives up by itself before
_END_SECONDS = {"offline": 30.0, "online": 60.0}  # after which it goes on sending behind our back
_STOP_SECONDS = 10.0  # likewise, where a scheduler waits for the run to end


class Tracker:
    """Writes a run's rows and summary; a context manager, so that wandb learns how the run ended.

    wandb starts along with it and follows the file, to which rows are only appended from then on; see `ready`.
    """

    def __init__(self, folder: pathlib.Path, settings: Settings, say: Callable[[str], None] = print) -> None:
        """Continues the record in `folder`; `say` is told in a line what concerns wandb."""
        self._path, self._say = folder / METRICS, say
        self._summary: dict[str, Any] = {}
        self._mirror = _Mirror(_job(folder, settings)) if _records(settings) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if self._mirror is None:
            return
        stopped = isinstance(error, errors.InterruptedRunError)
        end = {"summary": self._summary, "exit_code": 0 if error is None else 1, "preempted": stopped}
        if failure := self._mirror.end(end, _STOP_SECONDS if stopped else None):
            self._say(f"wandb: {failure}; all rows are in {self._path}")

    def ready(self) -> None:
        """Waits until wandb is there, and says where it records if not as asked.

        Raises:
          ConfigError: `wandb.mode` is online, and the server cannot be reached.
        """
        if self._mirror is not None and (notice := self._mirror.start()):
            self._say(notice)

    def log(self, step: int, row: dict[str, float]) -> None:
        """Writes a row; steps must increase, and numbers must be finite."""
        if is_writer():
            files.append_line(self._path, {"step": step, **row})

    def summarize(self, results: dict[str, Any]) -> None:
        """Puts a run's results into wandb's summary; `summary.json` is written when all else is done."""
        self._summary = results


def send_table(folder: pathlib.Path, settings: Settings, name: str, rows: list[dict[str, Any]]) -> None:
    """The flat columns of rows as a table of that name in wandb, unless it is disabled; a failure is a warning."""
    if not _records(settings):
        return
    columns = sorted({column for row in rows for column, value in row.items() if not isinstance(value, dict)})
    data = [[row.get(column) for column in columns] for row in rows]
    mirror = _Mirror(_job(folder, settings) | {"table": name, "columns": columns, "data": data, "rows": len(rows)})
    try:
        notice = mirror.start()
    except ConfigError as error:
        notice = str(error)
    failure = mirror.end({}, None)
    for said in filter(None, (notice, failure and f"wandb: {failure}")):
        warnings.warn(f"{said}; the rows are in {folder}", stacklevel=2)


class _Mirror:
    """The process that speaks with wandb, see `research.runs.mirror`; nothing here waits longer than it says."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._asked, self._mode, self._lost = job["mode"], "offline", False
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            (sys.executable, "-m", _PROGRAM),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # which Ctrl-C does not reach
            cwd=pathlib.Path(__file__).parents[2],
        )
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._tell, args=(job,), daemon=True).start()  # a large table fills the pipe

    def start(self) -> str:
        """Waits for wandb, and returns what there is to say of it; raises as `Tracker.ready`."""
        answer = self._answer(_START_SECONDS)
        if "error" in answer:
            raise ConfigError(
                f"config.wandb.mode={self._asked!r}: {answer['error']}; must be auto, offline or disabled without it"
            )
        if "mode" not in answer:
            self._lost = True
            return f"wandb: {answer.get('failed', 'does not start')}; the run goes on without it"
        self._mode = answer["mode"]
        return answer["notice"]

    def end(self, end: dict[str, Any], seconds: float | None) -> str:
        """Tells that the run has ended, waits some seconds for wandb to be done, and returns what went wrong."""
        if self._lost:  # which was said
            return ""
        self._tell(end)
        wait = _END_SECONDS[self._mode] if seconds is None else seconds
        try:
            self._process.wait(wait)
        except subprocess.TimeoutExpired:
            return f"still sends after {wait:.0f} s, and goes on behind (process {self._process.pid})"
        killed = f"ended with {self._process.returncode}" if self._process.returncode else ""
        return self._answer(1.0).get("failed", killed)

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return {}

    def _tell(self, line: dict[str, Any]) -> None:
        try:
            self._process.stdin.write((json.dumps(line) + "\n").encode())
            self._process.stdin.flush()
        except (OSError, ValueError):  # it has ended; its last answer says why
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _listen(self) -> None:
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({})


def _records(settings: Settings) -> bool:
    return login.resolve(settings.wandb.mode) != "disabled" and is_writer()


def _job(folder: pathlib.Path, settings: Settings) -> dict[str, Any]:
    return {
        "folder": str(folder.absolute()),
        "project": settings.wandb.project,
        "mode": settings.wandb.mode,
        "config": fields.as_json(settings),
    }
