"""What a run leaves in its folder: JSON lines always, and the same numbers under the same names in wandb.

* `config.json`: the resolved config;
* `environment.json`: commit, interpreter, packages, device, corpus;
* `metrics.jsonl`: one row per logged step, flushed a line at a time;
* `summary.json`: how it ended; absent while it runs and after a kill;
* `checkpoints/`: see `research.training.checkpoints`;
* `profile/`: a trace, where `config.profile` asks for one; see `research.training.profile`;
* `nonfinite/`: what is kept of a step whose loss was NaN; see `research.training.inspection`;
* `wandb/` and `wandb_id`: wandb's own files, and the id under which a resumed run goes on.

Of several processes the first alone writes.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import uuid
from typing import Any

import jax
import ml_collections

from research import errors

CONFIG = "config.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"

_PACKAGES = ("jax", "jaxlib", "tokamax", "dm-haiku", "optax", "numpy")


class Tracker:
    """Writes a run's rows and summary; a context manager, so that wandb learns whether the run failed."""

    def __init__(self, folder: pathlib.Path, config: ml_collections.ConfigDict):
        """Starts or continues the record in `folder`; see `config.wandb` for the part of wandb."""
        self._path = folder / METRICS
        self._wandb = start_wandb(folder, config)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if self._wandb is not None:
            if isinstance(error, errors.InterruptedRunError):
                self._wandb.mark_preempting()  # so that a sweep's agent may take it up again
            self._wandb.finish(exit_code=0 if error is None else 1)

    def log(self, step: int, row: dict[str, float]) -> None:
        """Writes a row; steps must increase, and numbers must be finite."""
        line = json.dumps({"step": step, **row}, allow_nan=False) + "\n"
        if _writes():
            with errors.of_disk(self._path), open(self._path, "a", encoding="utf-8") as file:
                file.write(line)
        if self._wandb is not None:
            self._wandb.log(row, step=step)

    def summarize(self, results: dict[str, Any]) -> None:
        """Puts a run's results into wandb's summary; `summary.json` is written when all else is done."""
        if self._wandb is not None:
            self._wandb.summary.update(results)


def environment(corpus: dict[str, Any]) -> dict[str, Any]:
    """What the run depends on beside its config; `corpus` is the data's own description."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "corpus": corpus,
    }


def read_rows(folder: pathlib.Path) -> list[dict[str, float]]:
    """The rows of `metrics.jsonl`; a last line cut short by a kill is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    return read_lines(path)


def drop_rows_after(folder: pathlib.Path, step: int) -> None:
    """Removes the rows that a run resumed from the checkpoint at `step` will write again."""
    kept = [json.dumps(row) + "\n" for row in read_rows(folder) if row["step"] <= step]
    _replace(folder / METRICS, "".join(kept))


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; what follows the last newline was never finished, and is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def drop_unfinished_line(path: pathlib.Path) -> None:
    """Cuts off what a kill left of a line in a JSONL file, so that rows can be appended."""
    if path.exists():
        content = path.read_bytes()
        with open(path, "r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def read_json(path: pathlib.Path) -> Any:
    """Reads a file that `write_json` wrote; an empty dict where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes all of it or, if killed, nothing."""
    _replace(path, json.dumps(value, indent=2) + "\n")


def _replace(path: pathlib.Path, text: str) -> None:
    if not _writes():
        return
    beside = path.with_name(path.name + ".new")
    try:
        with errors.of_disk(path):
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _writes() -> bool:
    return jax.process_index() == 0


def _commit() -> str:
    """The checked-out commit, with '-dirty' where files differ from it; empty outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return ""
    return done.stdout.strip()


def start_wandb(folder: pathlib.Path, config: ml_collections.ConfigDict) -> Any:
    """Returns wandb's run, or None where it is disabled."""
    if config.wandb.mode == "disabled" or not _writes():
        return None
    import wandb  # half a second, and only where wanted

    mode = config.wandb.mode
    if mode == "auto":
        # Credentials are looked up, not verified: verifying needs the network.
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
    identity = folder / "wandb_id"
    if not identity.exists() or "WANDB_SWEEP_ID" in os.environ:  # an agent's run has the id that the agent gave it
        _replace(identity, os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8])
    return wandb.init(
        project=config.wandb.project,
        name=folder.name,
        id=identity.read_text(encoding="utf-8"),
        resume="allow",
        dir=folder,
        mode=mode,
        config=json.loads(config.to_json_best_effort()),
        settings=wandb.Settings(silent=True, console="off"),
    )


def send_table(folder: pathlib.Path, config: ml_collections.ConfigDict, name: str, rows: list[dict[str, Any]]) -> None:
    """The flat columns of rows as a table of that name in wandb, unless it is disabled."""
    run = start_wandb(folder, config)
    if run is None:
        return
    import wandb

    columns = sorted({column for row in rows for column, value in row.items() if not isinstance(value, dict)})
    data = [[row.get(column) for column in columns] for row in rows]
    run.log({name: wandb.Table(columns=columns, data=data)}, step=len(rows))
    run.finish()
