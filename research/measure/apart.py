"""Measurements in a process of their own, whose end, whatever it is, costs nothing but that measurement."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

# The kernel takes the largest process when memory runs out, which leaves no message of its own.
_KILLED = {signal.SIGKILL: "out of host memory (killed)"}


class Outcome(NamedTuple):
    """The rows that were printed, how the process ended, in words fit for a `status`, and the end of its stderr."""

    rows: list[dict[str, Any]]
    ending: str
    message: str


def run(module: str, text: str, timeout: float, environment: dict[str, str]) -> Outcome:
    """Runs `python -m module FILE`, which prints JSON rows.

    Args:
      module: what to run.
      text: the file's content.
      timeout: seconds, after which the process is killed.
      environment: variables beside the present ones.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "point.json"
        file.write_text(text, encoding="utf-8")
        command = (sys.executable, "-m", module, str(file))
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, check=False, env=os.environ | environment
            )
            output, ending, message = done.stdout, _ending(done.returncode), done.stderr[-2000:]
        except subprocess.TimeoutExpired as error:
            output, ending, message = (error.stdout or b"").decode(), f"over {timeout:.0f} s", ""
    return Outcome([json.loads(line) for line in output.splitlines() if line.startswith("{")], ending, message)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return _KILLED.get(-code, f"killed by {signal.Signals(-code).name}")
