"""Runs that are killed, stopped, damaged or changed, and go on."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest
import rich.console
from jax.experimental.compilation_cache import compilation_cache

from research import errors
from research.config import ConfigError
from research.runs import tracking
from research.runs.folder import read_rows
from research.training import run
from research.training.interruption import Interruption
from tests import tiny

ROOT = pathlib.Path(__file__).parents[2]
TIMES = {"data_seconds", "step_seconds", "tokens_per_second"}
STEPS, CHECKPOINT_EVERY, KILLS = 80, 4, 5

# wandb's part is played by a file that gets the id of every start.
SCRIPT = """
import sys, types
from unittest import mock
def init(**arguments):
    with open(arguments["dir"] / "wandb_starts", "a") as file:
        file.write(f"{arguments['id']} {arguments['resume']}\\n")
    return mock.MagicMock()
sys.modules["wandb"] = types.SimpleNamespace(init=init, Settings=mock.MagicMock())
import pathlib
from tests.training import test_resume
test_resume.train(test_resume.make(pathlib.Path(sys.argv[1])))
"""


def make(folder, **overrides):
    config = tiny.get_config()
    config.train.update(steps=STEPS, eval_every=40, checkpoint_every=CHECKPOINT_EVERY)
    config.wandb.mode = "offline"
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in overrides.items()})
    config.run.root, config.run.id = str(folder.parent), folder.name
    return config


def train(config):
    console = rich.console.Console(record=True, file=open(os.devnull, "w"), width=200)  # noqa: SIM115
    run.run(config, {}, console)
    return console.export_text()


def rows(folder):
    """All that must be repeated to the last bit."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in read_rows(folder)]


def last_record(folder):
    """Fingerprints of all arrays after the last step, and where the data iterator stands."""
    return json.loads((folder / "checkpoints" / str(STEPS) / "record" / "metadata").read_text())


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Compiles each program once for this file, whose runs differ in how they end; a folder."""
    folder = str(tmp_path_factory.mktemp("cache"))
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for values in (settings, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is settings:
            yield folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    train(make(folder, wandb__mode="disabled"))
    return folder


@pytest.fixture
def copy(unbroken, tmp_path):
    """A run of which nothing says that it has finished."""
    shutil.copytree(unbroken, tmp_path / "copy")
    (tmp_path / "copy" / "summary.json").unlink()
    return tmp_path / "copy"


def test_killed_run_ends_as_if_it_had_not_been(unbroken, tmp_path, cache):
    """SIGKILL at random moments: while steps are done, rows written, checkpoints written."""
    folder, chance = tmp_path / "killed", random.Random(0)
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    starts, codes = 0, []
    while not (folder / "summary.json").exists():
        starts += 1
        before = len(read_rows(folder))
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        while process.poll() is None and wandb_starts(folder) < starts:
            time.sleep(0.01)
        if starts <= KILLS:
            time.sleep(chance.uniform(0, 0.4))
            process.kill()
        codes.append(process.wait())
        # No more is lost than since the last checkpoint, and the one that was being written.
        assert len(read_rows(folder)) >= before - 2 * CHECKPOINT_EVERY
    assert set(codes[:-1]) == {-signal.SIGKILL}
    assert codes[-1] == 0
    assert len(codes) > 2
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))
    assert rows(folder) == rows(unbroken)
    assert last_record(folder) == last_record(unbroken)
    assert len(set((folder / "wandb_starts").read_text().splitlines())) == 1


def wandb_starts(folder):
    path = folder / "wandb_starts"
    return path.read_text().count("\n") if path.exists() else 0


def test_signal_stops_after_the_step_and_saves_it(unbroken, tmp_path, monkeypatch):
    folder, log = tmp_path / "stopped", tracking.Tracker.log

    def log_and_signal(self, step, row):
        log(self, step, row)
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(tracking.Tracker, "log", log_and_signal)
        message = (
            rf"^SIGTERM after step 7 of {STEPS}, which is saved; start again with --config.run.id=stopped to go on"
        )
        with pytest.raises(errors.InterruptedRunError, match=message):
            train(make(folder, wandb__mode="disabled"))
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert [row["step"] for row in rows(folder)] == list(range(1, 8))
    assert "resumed after step 7" in train(make(folder, wandb__mode="disabled"))
    assert rows(folder) == rows(unbroken)
    assert last_record(folder) == last_record(unbroken)


def test_second_signal_is_not_held_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Interruption() as interruption:
        assert interruption.received() == ""
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.received() == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_launcher_tells_schedulers_that_a_stopped_run_goes_on(tmp_path):
    """Exit code 75, one line, no traceback."""
    command = [sys.executable, ROOT / "launch" / "train.py", f"--config={ROOT}/tests/tiny.py"]
    flags = [f"--config.run.root={tmp_path}", "--config.run.id=stopped", "--config.train.steps=100000"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*command, *flags], env=environment, **silent)
    while process.poll() is None and not read_rows(tmp_path / "stopped"):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 75
    found = re.fullmatch(
        r"interrupted: SIGTERM after step (\d+) of 100000, which is saved; "
        r"start again with --config.run.id=stopped to go on\n",
        told.decode(),
    )
    assert found, told.decode()
    assert (tmp_path / "stopped" / "checkpoints" / found[1]).is_dir()


def test_damaged_checkpoint_costs_the_steps_since_the_one_before(unbroken, copy):
    shutil.rmtree(copy / "checkpoints" / str(STEPS) / "state")
    with pytest.warns(UserWarning, match=f"checkpoint {STEPS} is damaged"):
        shown = train(make(copy, wandb__mode="disabled"))
    assert f"resumed after step {STEPS - CHECKPOINT_EVERY}" in shown
    assert rows(copy) == rows(unbroken)
    assert last_record(copy) == last_record(unbroken)
    assert (copy / "checkpoints" / f"{STEPS}.damaged").is_dir()


def test_finished_run_goes_on_with_more_steps(unbroken, tmp_path):
    folder = tmp_path / "longer"
    shutil.copytree(unbroken, folder)
    more = make(folder, train__steps=STEPS + 3, train__log_every=2, wandb__mode="disabled")
    shown = train(more)
    assert f"goes on with another train.log_every: 1 there, 2 here\ngoes on with another train.steps: {STEPS}" in shown
    assert f"resumed after step {STEPS}" in shown
    assert rows(folder)[:STEPS] == rows(unbroken)
    assert [row["step"] for row in rows(folder)[STEPS:]] == [STEPS + 2, STEPS + 3]
    assert json.loads((folder / "config.json").read_text())["train"]["steps"] == STEPS + 3
    assert "nothing to do" in train(more)
    fewer = make(folder, train__steps=STEPS, wandb__mode="disabled")
    assert "nothing to do" in train(fewer)
    (folder / "summary.json").unlink()
    with pytest.raises(ConfigError, match=rf"config.train.steps={STEPS}: must be more than the {STEPS + 3} that are"):
        train(fewer)


def test_settings_that_cannot_fit_are_all_named_and_nothing_is_touched(copy):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    with pytest.raises(ConfigError) as refusal:
        train(make(copy, model__hidden=64, model__layers=("csa",), train__log_every=2))
    for change in ("model.hidden: 32 there, 64 here", "model.layers: ['hca'] there, ['csa'] here"):
        assert change in str(refusal.value)
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_text_that_changed_is_refused(copy):
    recorded = json.loads((copy / "environment.json").read_text())
    recorded["corpus"]["digest"] = "another"
    (copy / "environment.json").write_text(json.dumps(recorded))
    with pytest.raises(ConfigError, match=r"config.data.path='stdlib': is not the text that the run was started with"):
        train(make(copy, wandb__mode="disabled"))
    assert rows(copy)[-1]["step"] == STEPS
