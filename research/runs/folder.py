"""The folder of a run: who owns it, what it holds, and every start of it.

* `config.json`: the resolved config;
* `starts.jsonl`: a row for every start: host, process, devices, versions, commit, corpus, overrides, where it went on;
* `metrics.jsonl`: one row per logged step, flushed a line at a time;
* `summary.json`: how it ended; absent while it runs and after a kill;
* `checkpoints/`: see `research.runs.checkpoints`;
* `profile/`: a trace, where `config.profile` asks for one; see `research.training.profile`;
* `nonfinite/`: what is kept of a step whose loss was NaN; see `research.training.inspection`;
* `wandb/` and `wandb_id`: wandb's own files, and the id under which a resumed run goes on;
* `lock`, and while it runs `owner.json`.

One process owns the folder and writes; of several processes of one run it is the first. Readers change nothing. JAX is
imported where a process asks which one it is: readers need none.
"""

import contextlib
import datetime
import fcntl
import functools
import importlib.metadata
import os
import pathlib
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import filelock

from research.errors import ConfigError, InUseError
from research.runs import files

CONFIG = "config.json"
STARTS = "starts.jsonl"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
LOCK = "lock"
OWNER = "owner.json"
FINISHED = "ok"  # the status of a summary
IMPORTED = "imported"  # in the summary of a run that holds published weights, and no optimizer's memory

_BEFORE_STARTS = "environment.json"  # what runs left that are older than the journal: the last start alone
_SECONDS = 1.0  # for a reader who looks whether the folder is owned to be out of the way


@contextlib.contextmanager
def owned(folder: pathlib.Path) -> Iterator[None]:
    """Within it, this process owns the folder, which is made if need be, and removed again if it stays empty.

    The lock is the operating system's (flock), and ends with the process whatever ends it; network file systems keep it
    over machines where they support flock (NFS, Lustre and others mounted so). Where a file system has none, the file
    itself is the lock, and one that a killed process on another machine left has to be removed by hand.

    Raises:
      InUseError: another process owns it; names its host and number.
      ConfigError: the folder cannot be made or locked.
    """
    lock = filelock.FileLock(folder / LOCK)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_SECONDS, poll_interval=0.05)
    except filelock.Timeout as error:
        raise InUseError(
            f"{folder} is in use by {_owner(folder)}; wait until it ends, stop it, or choose another config.run.id"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"config.run.root={str(folder.parent)!r}: cannot hold the folder of the run: {error}"
        ) from error
    try:
        files.write_json(folder / OWNER, {"host": socket.gethostname(), "process": os.getpid(), "since": _now()})
        yield
    finally:
        with contextlib.suppress(OSError):  # a full disk must not hide the error
            (folder / OWNER).unlink(missing_ok=True)
            if made and os.listdir(folder) == [LOCK]:
                (folder / LOCK).unlink()
                for path in made:
                    path.rmdir()
        lock.release()


def in_use(folder: pathlib.Path) -> str:
    """Who owns the folder, '' where nobody does; changes nothing in it."""
    if not (folder / LOCK).exists() or not (folder / OWNER).exists():
        return ""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or no flock here and the file is the lock
        return _owner(folder)
    finally:
        os.close(handle)
    return ""


def _owner(folder: pathlib.Path) -> str:
    found = files.read_json(folder / OWNER)
    if not found:
        return "another process"
    return f"process {found['process']} on {found['host']} since {found['since']}"


def read_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`; a last line cut short by a kill is left out."""
    return files.read_lines(folder / METRICS)


def start_rows(folder: pathlib.Path, step: int, restored: bool) -> str:
    """Makes `metrics.jsonl` that of a run that has done `step` updates; says in a line what was done with other rows.

    The rows behind a checkpoint that was restored will be written again, and are dropped. Without one none is: the file
    is kept under another name.
    """
    path = folder / METRICS
    files.repair_lines(path)
    rows = read_rows(folder)
    kept = [row for row in rows if row["step"] <= step]
    if len(kept) == len(rows):
        return ""
    if restored:
        files.write_lines(path, kept)
        return ""
    number = len(list(folder.glob("metrics-*.jsonl"))) + 1
    aside = folder / f"metrics-{number}.jsonl"
    path.rename(aside)
    return f"starts at the first step: no checkpoint was written before; the {len(rows)} rows so far are in {aside}"


def read_starts(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of `starts.jsonl`, from the first start on."""
    before = files.read_json(folder / _BEFORE_STARTS)
    return ([before] if before else []) + files.read_lines(folder / STARTS)


def last_start(folder: pathlib.Path) -> dict[str, Any]:
    """The last row of `starts.jsonl`; an empty dict where there is none."""
    return next(reversed(read_starts(folder)), {})


def record_start(folder: pathlib.Path, start: dict[str, Any]) -> None:
    """Appends a start to the journal."""
    files.repair_lines(folder / STARTS)
    files.append_line(folder / STARTS, start)


def environment() -> dict[str, Any]:
    """What a start depends on beside its config: machine, devices, commit, and the version of all that is imported."""
    import jax

    device = jax.devices()[0]
    return {
        "date": _now(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "command": sys.argv,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": _versions(),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
    }


def changes(before: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What may make a run go on otherwise than it began, between two `environment`s: a line each."""
    named = {"commit": "commit", "python": "python", "device": "device", "platform": "platform", "devices": "devices"}
    lines = [
        f"{name} {here[key]} (was {before[key]})"
        for key, name in named.items()
        if key in before and before[key] != here[key]
    ]
    old, new = before.get("packages", {}), here["packages"]
    lines += [
        f"{name} {new.get(name, 'absent')} (was {old[name]})"
        for name in sorted(old)
        if name in _DECISIVE and old[name] != new.get(name)
    ]
    return lines


# Packages that decide what is computed, or in which order data come.
_DECISIVE = ("jax", "jaxlib", "libtpu", "tokamax", "dm-haiku", "optax", "orbax-checkpoint", "grain", "numpy")


def is_writer() -> bool:
    """Whether this process is the one that writes."""
    import jax

    return jax.process_index() == 0


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    """Of every package that a module comes from which is imported."""
    packages = _packages()
    names = {
        name for module in {module.partition(".")[0] for module in sys.modules} for name in packages.get(module, [])
    }
    return {name: importlib.metadata.version(name) for name in sorted(names)}


@functools.cache
def _packages() -> dict[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _commit() -> str:
    """The checked-out commit, with '-dirty' where files differ from it; empty outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return ""
    return done.stdout.strip()
