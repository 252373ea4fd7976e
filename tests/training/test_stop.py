"""Real runs by the launcher, stopped as the world stops them: every process of the job at once, in every phase."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from research.runs import checkpoints, files, mirror
from research.runs.folder import read_rows, read_starts

ROOT = pathlib.Path(__file__).parents[2]
LONG = ("train.steps=100000", "train.checkpoint_every=0", "train.eval_every=0")


@pytest.fixture
def start(tmp_path):
    """Starts a run named `run`; ends what a failing test leaves."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "NETRC": "/no/such/file"}
    started = []

    def start(*overrides):
        flags = [f"--config.{override}" for override in (f"run.root={tmp_path}", "run.id=run", *overrides)]
        command = [sys.executable, ROOT / "launch" / "train.py", f"--config={ROOT}/tests/tiny.py", *flags]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, start_new_session=True, **output))
        return started[-1]

    yield start
    for process in started:
        for pid in (process.pid, *descendants(process.pid)):
            if process.poll() is None:
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def descendants(process):
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False).stdout.split()
    return [child for pid in map(int, found) for child in (pid, *descendants(pid))]


def wait_for(condition, process):
    while process.poll() is None and not condition():
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGINT, signal.SIGUSR1))]
)
def test_signal_to_every_process_of_the_job_saves_the_step(start, tmp_path, number):
    process = start(*LONG, "wandb.mode=offline")
    folder = tmp_path / "run"
    wait_for(lambda: len(read_rows(folder)) > 5, process)
    everyone = [process.pid, *descendants(process.pid)]
    assert len(everyone) >= 3  # with wandb's
    for pid in everyone:
        os.kill(pid, number)
    shown, told = process.communicate(timeout=60)
    assert process.returncode == 75, told
    found = re.fullmatch(
        r"interrupted: (SIG\w+) after step (\d+) of 100000, which is saved; "
        r"start again with --config.run.id=run to go on\n",
        told,
    )
    assert found, told
    assert shown.count("; all rows are in") <= 1  # what wandb lost is one line
    step = int(found[2])
    assert checkpoints.steps(folder / "checkpoints") == [step]
    assert [row["step"] for row in read_rows(folder)] == [*range(1, step + 1)]
    deadline = time.monotonic() + 60  # on a busy machine wandb goes on behind for a while, as the run then says
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in everyone):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    # The next start goes on from there, and wandb has every step once.
    again = start(f"train.steps={step + 2}", *LONG[1:], "wandb.mode=offline")
    shown, told = again.communicate(timeout=120)
    assert again.returncode == 0, told
    assert f"resumed after step {step}" in shown
    sent = [step for record in sorted((folder / "wandb").glob("*run-*/*.wandb")) for step in mirror.sent_steps(record)]
    assert sorted(sent) == [*range(1, step + 3)]


@pytest.mark.slow
def test_second_start_is_refused_and_the_first_goes_on_unharmed(start, tmp_path):
    folder = tmp_path / "run"
    first = start("train.steps=300", "train.checkpoint_every=5", "train.keep_last=1")
    wait_for(lambda: checkpoints.steps(folder / "checkpoints"), first)
    os.kill(first.pid, signal.SIGSTOP)  # as if it took long, a checkpoint half-written perhaps
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    for _ in range(2):
        second = start("train.steps=300", "train.checkpoint_every=5", "train.keep_last=1")
        assert second.wait(timeout=120) == 2
        told = second.stderr.read()
        assert re.fullmatch(rf"in use: {folder} is in use by process {first.pid} on \S+ since [^\n]*\n", told), told
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
    os.kill(first.pid, signal.SIGCONT)
    _, told = first.communicate(timeout=300)
    assert first.returncode == 0, told
    assert [row["step"] for row in read_rows(folder)] == [*range(1, 301)]
    assert checkpoints.steps(folder / "checkpoints")[0] == 300
    assert len(read_starts(folder)) == 1
    assert files.read_json(folder / "summary.json")["status"] == "ok"


@pytest.mark.slow
def test_signal_in_validation_is_heard_and_the_step_is_saved_before(start, tmp_path):
    """The last step is saved, and validated by the next start; so is one that was due."""
    folder = tmp_path / "run"
    process = start("train.steps=4", "train.checkpoint_every=2", "train.eval_every=2", "train.eval_batches=1500")
    wait_for(lambda: 2 in checkpoints.steps(folder / "checkpoints"), process)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert (process.returncode, "SIGTERM after step 2 of 4, which is saved" in told) == (75, True), told
    assert [row["step"] for row in read_rows(folder)] == [1]
    again = start("train.steps=4", "train.checkpoint_every=2", "train.eval_every=2", "train.eval_batches=1500")
    _, told = again.communicate(timeout=120)
    assert again.returncode == 0, told
    recorded = read_rows(folder)
    assert [row["step"] for row in recorded] == [1, 2, 3, 4]
    assert ["val_loss" in row for row in recorded] == [False, True, False, True]


@pytest.mark.slow
def test_signal_before_the_first_step_says_that_nothing_is_saved(start, tmp_path):
    """Sent while it compiles, and reads text."""
    process = start(*LONG)
    wait_for(lambda: (tmp_path / "run" / "starts.jsonl").exists(), process)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=120)
    assert (process.returncode, told) == (
        75,
        "interrupted: SIGTERM before the first step, nothing is saved yet; "
        "start again with --config.run.id=run to go on\n",
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    assert not checkpoints.steps(tmp_path / "run" / "checkpoints")
