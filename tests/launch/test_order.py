"""Points that are after others: here, in parallel, as Slurm's jobs, through wandb's agents, and narrowed."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from research import exits
from research.errors import ConfigError
from research.sweeps import agents, slurm, sweep
from tests import tiny
from tests.launch import conftest
from tests.launch.test_slurm import states  # noqa: F401, a fixture

ROOT = pathlib.Path(__file__).parents[2]
CHAIN = f"{ROOT}/tests/points.py:chain"
LATER, FIRST = "seed=2,learning_rate=0.002,start_from=learning_rate=0.001", "learning_rate=0.001"
FAILED = "learning_rate=1e+30"


def run(points, parallel=1, fresh=False):
    notes = {}
    rows = dict(sweep.run(points, fresh, parallel, notes.__setitem__))
    return [rows[place] for place in range(len(points))], notes


def started(row):
    return float((pathlib.Path(row["folder"]) / "ran").read_text().split()[0])


def ended(row):
    return float((pathlib.Path(row["folder"]) / "ran").read_text().split()[1])


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_point_starts_when_those_before_it_have_finished(fake, parallel, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "0.3")
    rows, notes = run(sweep.plan(CHAIN, fake, "cpu", fresh=False), parallel)
    skipped, later, failed, first = rows
    assert (first["status"], later["status"]) == ("ok", "ok")
    assert started(later) >= ended(first)
    assert failed["status"] == "killed by SIGKILL"
    assert skipped["status"] == notes[0] == f"skipped: {FAILED} failed"
    assert skipped["message"] == f"it is after {FAILED}, which ended: killed by SIGKILL"
    assert not pathlib.Path(skipped["folder"]).exists()


def test_started_again_only_what_failed_and_what_waits_is_tried(fake):
    run(sweep.plan(CHAIN, fake, "cpu", fresh=False))
    points = sweep.plan(CHAIN, fake, "cpu", fresh=False)
    assert [point.finished for point in points] == [False, True, False, True]
    rows, notes = run(points)
    assert [notes[place] == sweep.FINISHED_BEFORE for place in range(4)] == [False, True, False, True]
    assert rows[0]["status"] == f"skipped: {FAILED} failed"


def test_narrowing_leaves_out_only_what_has_finished(fake):
    narrow = fake | {"seed": 2}
    with pytest.raises(
        ConfigError, match=f"^{LATER}: is after {FIRST}, which the overrides leave out and which has not"
    ):
        sweep.plan(CHAIN, narrow, "cpu", fresh=False)
    (first,) = sweep.plan(CHAIN, fake | {"optimizer.learning_rate": 1e-3}, "cpu", fresh=False)
    run([first])
    (later,) = sweep.plan(CHAIN, narrow, "cpu", fresh=False)
    assert later.folder.parent == first.folder.parent  # where `start_from` looks for the label
    assert f"--config.run.root={first.folder.parent}" in later.command
    assert run([later])[0][0]["status"] == "ok"


@pytest.mark.slow
def test_a_narrowed_sweep_keeps_the_rows_of_the_others(fake, tmp_path):
    script = tmp_path / "fake.py"  # of the fixture
    command = [sys.executable, "-c", conftest.LAUNCHER, script, f"--config={CHAIN}"]

    def launch(*arguments):
        done = subprocess.run(
            [*command, f"--config.run.root={fake['run.root']}", *arguments],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        (results,) = (tmp_path / "runs").glob("*/results.jsonl")
        return done, [json.loads(line) for line in results.read_text().splitlines()]

    done, rows = launch()
    assert done.returncode == exits.FAILED, done.stderr
    assert f"skipped: {FAILED} failed: it is after {FAILED}" in done.stdout
    assert [row["status"] for row in rows] == [f"skipped: {FAILED} failed", "ok", "killed by SIGKILL", "ok"]
    done, narrowed = launch("--config.seed=2")
    assert done.returncode == 0, done.stderr
    assert narrowed == rows


def test_jobs_of_slurm_depend_on_those_before_them(fake, states):  # noqa: F811
    """The cluster here starts what it is given at once; that it was told to wait is in the script it was given."""
    points = sweep.plan(CHAIN, fake | {"optimizer.learning_rate": 1e-3}, "cpu", fresh=False)
    run(points)  # the first has finished: the one after it needs to wait for no job
    points = sweep.plan(CHAIN, fake, "cpu", fresh=False)
    jobs = slurm.executor(points, ["timeout_min=5", "slurm_dependency=after:7"], parallel=0)
    notes = {}
    rows = dict(slurm.run(jobs, points, False, notes.__setitem__, poll_seconds=0.1))
    assert (rows[1]["status"], rows[3]["status"]) == ("ok", "ok")
    assert notes[3] == sweep.FINISHED_BEFORE
    # Whether the failed one has ended when the cluster starts the other, or has not: it is not run.
    assert rows[0]["status"] == f"skipped: {FAILED} failed"
    failed = notes[2].removeprefix("job ")
    script = (states.parent / "states.sh").read_text()  # the last that was submitted
    assert f"#SBATCH --dependency=after:7,afterany:{failed}\n" in script
    assert jobs.parameters["dependency"] == "after:7"


def test_jobs_that_keep_no_order_are_refused(fake):
    points = sweep.plan(CHAIN, fake, "cpu", fresh=False)
    jobs = slurm.executor(points, ["timeout_min=5"], parallel=0, cluster="local")
    with pytest.raises(ConfigError, match="jobs on 'local' start in no order, but points are after others"):
        list(slurm.run(jobs, points, False, lambda *_: None, poll_seconds=0.1))
    assert not any(point.folder.exists() for point in points)


def test_wandbs_agents_are_refused_points_after_points(fake):
    settings = tiny.get_config().wandb
    settings.mode = "offline"
    points = sweep.plan(CHAIN, fake, "cpu", fresh=True)
    with pytest.raises(
        ConfigError, match=r"^--to=wandb: seed=1,.* is after learning_rate=1e\+30, and wandb's agents keep"
    ):
        agents.describe(CHAIN, fake, points, settings)
    common = fake | {"optimizer.learning_rate": 1e-3}
    described = agents.describe(CHAIN, common, sweep.plan(CHAIN, common, "cpu", fresh=True), settings)
    assert described["parameters"]["point"]["values"] == [FIRST]
