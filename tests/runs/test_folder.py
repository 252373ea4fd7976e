"""Who owns a run's folder, over real processes, and what is remembered of its starts."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from research import errors
from research.errors import DamagedError, InUseError
from research.runs import files, folder

HOLD = """
import pathlib, sys
from research.runs import folder
with folder.owned(pathlib.Path(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def hold():
    """Starts a process that owns a folder until it is told, or killed."""
    started = []

    def start(path):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "mine\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_second_owner_is_told_who_the_first_is(hold, tmp_path):
    path = tmp_path / "runs" / "one"
    first = hold(path)
    named = rf"{path} is in use by process {first.pid} on {socket.gethostname()} since 20[^;]*"
    told = rf"^{named}; wait until it ends, stop it, or choose another config\.run\.id$"
    with pytest.raises(InUseError, match=told), folder.owned(path):
        pass
    assert f"{path} is in use by {folder.in_use(path)}".startswith(f"{path} is in use by process {first.pid} on ")
    assert files.read_json(path / "owner.json")["process"] == first.pid  # the refused one has not taken its name away
    first.communicate("\n")
    assert folder.in_use(path) == ""
    with folder.owned(path):
        assert files.read_json(path / "owner.json")["process"] == os.getpid()
        (path / "config.json").write_text("{}")
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "lock"]


def test_a_folder_that_stays_empty_is_removed_again_with_those_made_for_it(tmp_path):
    with folder.owned(tmp_path / "runs" / "of" / "one"):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs" / "there").mkdir(parents=True)
    with folder.owned(tmp_path / "runs" / "there"), folder.owned(tmp_path / "runs" / "new"):
        pass
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["there"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_owner_owns_nothing(hold, tmp_path, number):
    first = hold(tmp_path)
    first.send_signal(number)
    first.wait()
    assert folder.in_use(tmp_path) == ""
    with folder.owned(tmp_path):
        pass


def test_looking_changes_nothing_and_keeps_nobody_out(hold, tmp_path):
    assert folder.in_use(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
    hold(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert "process" in folder.in_use(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_refusal_has_a_kind_of_its_own():
    assert errors.kind(InUseError("x")) == "in use"
    assert errors.kind(DamagedError("x")) == "damaged"


def test_every_start_is_kept(tmp_path):
    files.write_json(tmp_path / "environment.json", {"date": "before there was a journal"})
    for number in (1, 2):
        folder.record_start(tmp_path, {"date": str(number)})
    with open(tmp_path / "starts.jsonl", "a") as file:
        file.write('{"date": "cut')
    with pytest.warns(UserWarning, match=r"starts\.jsonl, line 3: cut short, dropped"):
        folder.record_start(tmp_path, {"date": "3"})
    assert [start["date"] for start in folder.read_starts(tmp_path)] == ["before there was a journal", "1", "2", "3"]
    assert folder.last_start(tmp_path) == {"date": "3"}
    assert folder.last_start(tmp_path / "absent") == {}


def test_a_start_says_what_is_in_use():
    here = folder.environment()
    for name in ("jax", "jaxlib", "numpy", "filelock", "pytest"):
        assert name in here["packages"]
    assert (here["host"], here["process"], here["platform"]) == (socket.gethostname(), os.getpid(), "cpu")


def test_another_commit_jax_or_device_is_a_line(tmp_path):
    here = folder.environment()
    assert folder.changes(here, here) == []
    there = here | {"commit": "abc", "device": "TPU v5", "packages": here["packages"] | {"jax": "0.1", "pytest": "0.1"}}
    assert folder.changes(there, here) == [
        f"commit {here['commit']} (was abc)",
        f"device {here['device']} (was TPU v5)",
        f"jax {here['packages']['jax']} (was 0.1)",
    ]
    assert folder.changes({}, here) == []  # an older run did not say


def test_rows_behind_a_restored_checkpoint_alone_are_dropped(tmp_path):
    rows = [{"step": step} for step in range(1, 6)]
    files.write_lines(tmp_path / "metrics.jsonl", rows)
    assert folder.start_rows(tmp_path, 3, restored=True) == ""
    assert folder.read_rows(tmp_path) == rows[:3]
    # Without a checkpoint they are kept, also the second time.
    for number, count in ((1, 3), (2, 2)):
        said = folder.start_rows(tmp_path, 0, restored=False)
        assert said.endswith(f"the {count} rows so far are in {tmp_path}/metrics-{number}.jsonl")
        assert files.read_lines(tmp_path / f"metrics-{number}.jsonl") == rows[:count]
        assert folder.read_rows(tmp_path) == []
        files.write_lines(tmp_path / "metrics.jsonl", rows[:2])
