"""wandb, in a process of its own: `python -m research.runs.mirror`, started by `research.runs.tracking`.

`metrics.jsonl` is what a run records; wandb holds the same. This process follows the file and sends its rows, each step
once: those that wandb's files of earlier starts lack are sent first. So nothing that wandb does or fails to do can end
or delay training, and what a killed run has written arrives all the same.

It is told what to do by lines of JSON on its standard input, and answers on its standard output:

    {"folder": ..., "config": {...}, "project": ..., "mode": ...}   the run; answered by {"mode": ...} or {"error": ...}
    {"summary": {...}, "exit_code": 0, "preempted": false}          the end; without it the run has been killed

The first line may also hold a table, which is then all that is sent. {"failed": ...} may be said at any time, as the
last word: the other rows are in `metrics.jsonl` alone until the next start.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import filelock

METRICS = "metrics.jsonl"
IDENTITY = "wandb_id"
SERVER_SECONDS = 5.0  # for a server to answer at all
_LOCK = "wandb_lock"
_START_SECONDS = 30.0  # for wandb to open a run
_END_SECONDS = {"offline": 60, "online": 600}  # to send the rest, after which this process is ended
_POLL_SECONDS = 0.2


class UnreachableError(Exception):
    """wandb's server does not answer."""


def main() -> None:
    """Mirrors one run, or sends one table."""
    parent = os.getppid()
    _own_standard_output()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler's signal to all is for the run, which says when to end
    # wandb's own way to stop a run from its page.
    signal.signal(signal.SIGINT, lambda *_: os.kill(parent, signal.SIGTERM))
    job = json.loads(sys.stdin.readline())
    folder = pathlib.Path(job["folder"])
    try:
        with filelock.FileLock(folder / _LOCK, timeout=_START_SECONDS):  # the one of a killed start may still send
            run, mode, notice = _open(job, folder)
            answer(mode=mode, notice=notice)
            if "table" in job:
                _send_table(run, job)
            else:
                _follow(run, folder, mode)
    except UnreachableError as error:
        answer(error=str(error))
    except Exception as error:  # whatever wandb raises; training must not notice
        answer(failed=f"{type(error).__name__}: {error}".splitlines()[0][:300])
    sys.stdout.flush()
    os._exit(0)  # without wandb's own clean-up, which may wait for ever


def answer(**said: Any) -> None:
    """Says something to the run, if it is still there."""
    try:
        print(json.dumps(said), flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, for as long as the process lives


def _own_standard_output() -> None:
    """Keeps wandb's processes from writing, or holding on to, what the run reads."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _open(job: dict[str, Any], folder: pathlib.Path) -> tuple[Any, str, str]:
    """wandb's run, its mode, and what there is to say of it.

    Raises:
      UnreachableError: the mode is online, and the server does not answer.
    """
    import wandb

    mode, notice, forced = job["mode"], "", job["mode"] == "online"
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE", "")
        forced = mode == "online"
        if not mode:
            # Credentials are looked up, not verified: verifying needs the network.
            mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
    if mode == "online":
        try:
            _require_server(wandb.setup().settings.base_url)
        except UnreachableError as error:
            if forced:
                raise
            mode, notice = "offline", f"wandb: {error}; recording offline"
    try:
        return _init(wandb, job, folder, mode), mode, notice
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if mode != "online":
            raise
        if forced:
            raise UnreachableError(reason) from error
        return _init(wandb, job, folder, "offline"), "offline", f"wandb: {reason}; recording offline"


def _init(wandb: Any, job: dict[str, Any], folder: pathlib.Path, mode: str) -> Any:
    identity = folder / IDENTITY
    given = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None  # the agent's
    if given or not identity.exists():
        identity.write_text(given or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8], encoding="utf-8")
    return wandb.init(
        project=job["project"],
        name=folder.name,
        id=identity.read_text(encoding="utf-8"),
        resume="allow",
        dir=folder,
        mode=mode,
        config=job["config"],
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=_START_SECONDS,
            x_stats_pid=os.getppid(),
        ),
    )


def _require_server(url: str) -> None:
    """Raises UnreachableError unless something answers there, whatever it says."""
    outcome: list[str] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(f"{url.rstrip('/')}/healthz", timeout=SERVER_SECONDS).close()
            outcome.append("")
        except urllib.error.HTTPError:
            outcome.append("")
        except OSError as error:
            outcome.append(str(getattr(error, "reason", error)))

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name knows no time-out
    asking.start()
    asking.join(2 * SERVER_SECONDS)
    reason = outcome[0] if outcome else "no answer"
    if reason:
        raise UnreachableError(f"{url} cannot be reached ({reason})")


def _sent(folder: pathlib.Path, run: Any, mode: str) -> set[int]:
    """The steps that wandb has."""
    if mode == "online":  # the server knows up to where
        return set(range(run.starting_step))
    return {step for record in (folder / "wandb").glob("*run-*/*.wandb") for step in sent_steps(record)}


def sent_steps(record: pathlib.Path) -> list[int]:
    """The steps of the rows in one of wandb's files, which may end anywhere, in order."""
    command = (sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(record))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (json.loads(line) for line in done.stdout.splitlines() if '"type":"history"' in line)
    return [line["history"]["item"]["_step"] for line in lines]


def _follow(run: Any, folder: pathlib.Path, mode: str) -> None:
    """Sends rows as they come, until the run has ended and all are sent."""
    sent, ended = _sent(folder, run, mode), threading.Event()
    end: dict[str, Any] = {"exit_code": 1}

    def listen() -> None:
        if line := sys.stdin.readline():
            end.update(json.loads(line))
        signal.alarm(_END_SECONDS[mode])  # ends this process, whatever it waits for
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    for row in _rows(folder / METRICS, ended):
        step = row.pop("step")
        if step not in sent:
            sent.add(step)
            run.log(row, step=step)
    run.summary.update(end.get("summary", {}))
    if end.get("preempted"):
        run.mark_preempting()  # so that a sweep's agent may take it up again
    run.finish(exit_code=end["exit_code"])


def _rows(path: pathlib.Path, ended: threading.Event) -> Iterator[dict[str, Any]]:
    """The rows of the file, to which lines are only appended, waiting for more until the run has ended."""
    while not path.exists() and not ended.is_set():
        time.sleep(_POLL_SECONDS)
    if not path.exists():
        return
    with open(path, "rb") as file:
        rest = b""
        while True:
            last = ended.is_set()
            *lines, rest = (rest + file.read()).split(b"\n")
            yield from (json.loads(line) for line in lines)
            if last:
                return
            ended.wait(_POLL_SECONDS)


def _send_table(run: Any, job: dict[str, Any]) -> None:
    import wandb

    run.log({job["table"]: wandb.Table(columns=job["columns"], data=job["data"])}, step=job["rows"])
    run.finish()


if __name__ == "__main__":
    main()
