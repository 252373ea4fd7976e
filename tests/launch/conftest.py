import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from research.sweeps import sweep

ROOT = pathlib.Path(__file__).parents[2]

# Stands in for launch/train.py: ends as the learning rate of the point demands, and notes when it ran. With FAKE_WAITS
# its first start waits to be stopped, and ends as a run does then; with FAKE_DEAF that takes a second signal.
FAKE = """
import json, os, pathlib, signal, sys, time
values = dict(argument.removeprefix("--config.").split("=", 1) for argument in sys.argv[1:])
folder = pathlib.Path(values["run.root"]) / values["run.id"]
def tell(**summary):
    (folder / "summary.json").write_text(json.dumps(summary))
def stop(number, frame):
    with open(folder / "told", "a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if "FAKE_DEAF" not in os.environ:
        tell(status="interrupted", message="SIGTERM after step 7 of 9, which is saved")
        sys.exit(75)
if (folder / "owner").exists():
    sys.exit("in use: a folder is in use by process 1 on some host")
started = (folder / "ran").exists()
with open(folder / "ran", "a") as file:
    file.write(f"{time.time()} ")
    time.sleep(float(os.environ.get("FAKE_SECONDS", 0)))
    file.write(f"{time.time()}\\n")
if "FAKE_WAITS" in os.environ and not started:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, stop)
    (folder / "process").write_text(str(os.getpid()))
    while True:
        time.sleep(0.02)
if values["optimizer.learning_rate"] == "1e+30" and "FAKE_WAITS" not in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
tell(status="ok", final_loss=1.5)
"""

# Runs launch/sweep.py with the fake, whose path comes first.
LAUNCHER = """
import pathlib, sys
from research.sweeps import sweep
sweep._TRAIN = pathlib.Path(sys.argv.pop(1))
sweep.detect_platform = lambda: "cpu"
from launch import flags
from launch import sweep as launcher
flags.run(launcher.main)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Points of a sweep run a script that ends at once; returns the overrides that are common to them."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(sweep, "_TRAIN", script)
    return {"run.root": str(tmp_path / "runs")}


@pytest.fixture
def launched(fake, tmp_path):
    """A function that starts launch/sweep.py with the fake in a process of its own."""
    processes = []

    def start(*arguments, **environment):
        command = [sys.executable, "-c", LAUNCHER, tmp_path / "fake.py", f"--config={ROOT}/tests/tiny.py"]
        processes.append(
            subprocess.Popen(
                [*command, f"--config.run.root={fake['run.root']}", *arguments],
                env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(found, seconds=120):
    """Waits until `found()` is true, and returns what it is."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)
    return value


def is_alive(process):
    """Whether the process of that number runs; one that has ended and that nobody has asked after does not."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def parent(process):
    return int(pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])


def descendants(process):
    """The numbers of all processes that it started, and those did."""
    parents = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            parents.setdefault(parent(path.name), []).append(int(path.name))
    found = [process]
    for number in found:
        found += parents.get(number, [])
    return found[1:]


def fakes(root, count=1):
    """The numbers of `count` fakes that wait to be stopped, in order of their points."""
    wait_for(
        lambda: (
            len(files := list(pathlib.Path(root).glob("*/*/process"))) == count
            and all(file.read_text() for file in files)
        )
    )
    return [int(file.read_text()) for file in sorted(pathlib.Path(root).glob("*/*/process"))]


def told(root):
    """The signals that each fake got."""
    return [file.read_text().split() for file in sorted(pathlib.Path(root).glob("*/*/told"))]


def results(root):
    (file,) = pathlib.Path(root).glob("*/results.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]
