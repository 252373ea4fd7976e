"""Runs that are killed, stopped, damaged or changed, and go on."""

import errno
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

from research import errors, exits
from research.errors import ConfigError, DamagedError
from research.runs import checkpoints, files, mirror, tracking
from research.runs.folder import read_rows, read_starts
from research.settings.config import read
from research.training import run
from research.training.interruption import Interruption
from tests import tiny

ROOT = pathlib.Path(__file__).parents[2]
TIMES = {"data_seconds", "step_seconds", "elapsed_seconds", "tokens_per_second", "peak_host_bytes"}
STEPS, CHECKPOINT_EVERY = 80, 4

SCRIPT = """
import pathlib, sys
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
    run.run(read(config), {}, console)
    return console.export_text()


def rows(folder):
    """All that must be repeated to the last bit."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in read_rows(folder)]


def last_record(folder):
    """Fingerprints of all arrays after the last step, and where the data iterator stands."""
    record = json.loads((folder / "checkpoints" / str(STEPS) / "record" / "metadata").read_text())
    return {name: record[name] for name in ("arrays", "iterator")}


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


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_killed_run_ends_as_if_it_had_not_been(unbroken, tmp_path, kills):
    """SIGKILL at random moments: while steps are done, rows written, checkpoints written."""
    folder, chance = tmp_path / "killed", random.Random(0)
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    codes = []
    while not (folder / "summary.json").exists():
        before, survived = len(read_rows(folder)), chance.randint(1, 3 * CHECKPOINT_EVERY)
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        if len(codes) < kills:
            while process.poll() is None and len(read_rows(folder)) < before + survived:
                time.sleep(0.002)
            process.kill()
        codes.append(process.wait())
        # No more is lost than since the last checkpoint, and the one that was being written.
        assert len(read_rows(folder)) >= before - 2 * CHECKPOINT_EVERY
    assert set(codes[:-1]) == {-signal.SIGKILL}
    assert codes[-1] == 0
    assert len(codes) == kills + 1
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))
    assert rows(folder) == rows(unbroken)
    elapsed = [row["elapsed_seconds"] for row in read_rows(folder)]
    assert elapsed == sorted(elapsed)
    assert last_record(folder) == last_record(unbroken)
    assert len(read_starts(folder)) == len(codes)
    sent = [mirror.sent_steps(record) for record in sorted((folder / "wandb").glob("*run-*/*.wandb"))]
    assert [step for steps in sent for step in steps] == list(range(1, STEPS + 1))
    assert {path.name.rpartition("-")[2] for path in (folder / "wandb").glob("*run-*")} == {
        (folder / "wandb_id").read_text()
    }


def test_signal_stops_after_the_step_and_saves_it(unbroken, tmp_path, monkeypatch):
    folder, log = tmp_path / "stopped", tracking.Tracker.log

    def log_and_signal(self, step, row):
        log(self, step, row)
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(tracking.Tracker, "log", log_and_signal)
        message = (
            rf"^SIGTERM after step 8 of {STEPS}, which is saved; start again with --config.run.id=stopped to go on"
        )
        with pytest.raises(errors.InterruptedRunError, match=message):
            train(make(folder, wandb__mode="disabled"))
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert [row["step"] for row in rows(folder)] == list(range(1, 9))  # step 8 had been started
    assert "resumed after step 8" in train(make(folder, wandb__mode="disabled"))
    assert rows(folder) == rows(unbroken)
    assert last_record(folder) == last_record(unbroken)


def test_a_signal_that_is_ignored_stays_so():
    """As SIGHUP under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGHUP)
        assert interruption.received() == ""
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


@pytest.mark.parametrize("number", exits.STOP_SIGNALS)
def test_one_request_may_come_by_several_ways_and_a_second_one_is_not_held_back(monkeypatch, number):
    stops = exits.STOP_SIGNALS
    before = [signal.getsignal(stop) for stop in stops]
    seen = []
    signal.signal(number, lambda *_: seen.append("again"))
    with Interruption() as interruption:
        assert interruption.received() == ""
        for repeated in (number, signal.SIGTERM, number):  # to the process, by its parent, to its group
            os.kill(os.getpid(), repeated)
        assert interruption.received() == signal.Signals(number).name
        assert seen == []
        monkeypatch.setattr("research.exits.AGAIN_SECONDS", 0.0)
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert seen == ["again"]
    signal.signal(number, before[stops.index(number)])
    assert [signal.getsignal(stop) for stop in stops] == before


@pytest.mark.slow
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


def touched(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "number", [errno.EIO, *(pytest.param(number, marks=pytest.mark.slow) for number in (errno.ESTALE, errno.EMFILE))]
)
def test_trouble_while_a_checkpoint_is_read_costs_nothing(unbroken, copy, monkeypatch, number):
    before = {name: (copy / name).read_bytes() for name in ("metrics.jsonl", "starts.jsonl")}
    saved = sorted(path.name for path in (copy / "checkpoints").iterdir())

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(number)):
        patch.setattr(checkpoints.ocp.StandardCheckpointHandler, "restore", refuse)
        train(make(copy, train__steps=STEPS + 4, wandb__mode="disabled"))
    assert {name: (copy / name).read_bytes() for name in before} == before
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == saved
    assert json.loads((copy / "summary.json").read_text())["status"] == "no access"
    assert f"resumed after step {STEPS}" in train(make(copy, train__steps=STEPS + 4, wandb__mode="disabled"))
    assert rows(copy)[:STEPS] == rows(unbroken)


def test_where_no_checkpoint_is_whole_the_run_does_not_start_over(copy):
    for step in checkpoints.steps(copy / "checkpoints"):
        (copy / "checkpoints" / str(step) / "record" / "metadata").unlink()
    before = touched(copy / "checkpoints"), (copy / "metrics.jsonl").read_bytes()
    with pytest.raises(DamagedError, match=r"none of the checkpoints is whole .*record/metadata is missing"):
        train(make(copy, wandb__mode="disabled"))
    assert (touched(copy / "checkpoints"), (copy / "metrics.jsonl").read_bytes()) == before


def test_where_the_checkpoints_are_gone_a_resumed_run_does_not_start_over(copy):
    files.append_line(copy / "starts.jsonl", read_starts(copy)[0] | {"resumed_after": 40})
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(DamagedError, match=r"its checkpoints, from which it was resumed, are gone; put one back"):
        train(make(copy, wandb__mode="disabled"))
    assert rows(copy)[-1]["step"] == STEPS


@pytest.mark.slow
def test_run_killed_before_its_first_checkpoint_keeps_what_it_logged(unbroken, copy):
    shutil.rmtree(copy / "checkpoints")
    shown = train(make(copy, wandb__mode="disabled"))
    assert f"the {STEPS} rows so far are in {copy}/metrics-1.jsonl" in shown
    assert len(files.read_lines(copy / "metrics-1.jsonl")) == STEPS
    assert rows(copy) == rows(unbroken)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            (name, content)
            for name in ("config.json", "summary.json", "environment.json")
            for content in (b"", b"\0\0\n")
        ),
        *(
            (name, content)
            for name in ("starts.jsonl", "metrics.jsonl")
            for content in (b"\0\0\0\n", b'{"step": 2, "gr\n')
        ),
    ],
)
def test_damaged_small_file_is_named_and_nothing_else_is_touched(copy, name, content):
    kept = (copy / name).read_bytes() if name.endswith("l") else b""
    (copy / name).write_bytes(kept + content)
    before = touched(copy)
    with pytest.raises(DamagedError, match=rf"^{copy}/{name}(, line \d+)?: [^\n]*$"):
        train(make(copy, wandb__mode="disabled"))
    now = touched(copy)
    now.pop(copy / "summary.json", None), before.pop(copy / "summary.json", None)  # says so
    now.pop(copy / "config.json"), before.pop(copy / "config.json")  # written anew, the same
    assert now == before


def test_field_that_is_newer_than_the_run_has_its_default(copy):
    stored = json.loads((copy / "config.json").read_text())
    del stored["attention"]["csa_stage"], stored["train"]["keep_best"], stored["wandb"]["project"]
    stored["rope"].pop("yarn_factor")
    (copy / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"rope\.yarn_factor: 1\.0 there, 2\.0 here"):
        train(make(copy, rope__yarn_factor=2.0, wandb__mode="disabled"))
    shown = train(make(copy, wandb__mode="disabled"))
    for line in (
        "config.attention.csa_stage: newer than the run; its default 'sparse' is",
        "config.rope.yarn_factor: newer",
    ):
        assert line in shown
    assert f"resumed after step {STEPS}" in shown


def test_field_that_this_version_does_not_know_is_named(copy):
    stored = json.loads((copy / "config.json").read_text())
    stored["attention"]["no_such"] = 3
    (copy / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"attention\.no_such: 3 there, 'no such field' here"):
        train(make(copy, wandb__mode="disabled"))


@pytest.mark.slow
def test_resume_under_another_commit_jax_or_device_says_so(copy):
    (start,) = read_starts(copy)
    other = start | {"commit": "abc", "device": "TPU v5", "packages": start["packages"] | {"jax": "0.1"}}
    files.write_lines(copy / "starts.jsonl", [other])
    shown = train(make(copy, wandb__mode="disabled"))
    for line in (
        f"goes on under another commit {start['commit']} (was abc)",
        "goes on under another device cpu (was TPU v5)",
        f"goes on under another jax {jax.__version__} (was 0.1)",
    ):
        assert line in shown
    assert [s["resumed_after"] for s in read_starts(copy)] == [0, STEPS]
    assert "goes on under" not in train(make(copy, train__steps=STEPS + 1, wandb__mode="disabled"))


def test_damaged_checkpoint_costs_the_steps_since_the_one_before(unbroken, copy):
    shutil.rmtree(copy / "checkpoints" / str(STEPS) / "state")
    shown = train(make(copy, wandb__mode="disabled"))
    assert f"checkpoint {STEPS} is damaged (state/_METADATA, state/manifest.ocdbt is missing)" in shown
    assert f"resumed after step {STEPS - CHECKPOINT_EVERY}" in shown
    assert rows(copy) == rows(unbroken)
    assert last_record(copy) == last_record(unbroken)
    assert (copy / "checkpoints" / f"{STEPS}.damaged").is_dir()


@pytest.mark.slow
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
    (recorded,) = read_starts(copy)
    recorded["corpus"]["digest"] = "another"
    files.write_lines(copy / "starts.jsonl", [recorded])
    with pytest.raises(ConfigError, match=r"config.data.path='stdlib': is not the text that the run was started with"):
        train(make(copy, wandb__mode="disabled"))
    assert rows(copy)[-1]["step"] == STEPS
