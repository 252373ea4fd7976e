"""Sweeps as jobs: through submitit's local executor, and its Slurm one with programs that stand in for Slurm's."""

import os
import pathlib
import re

import pytest
import submitit

from research import slurm, sweep
from research.config import ConfigError

ROOT = pathlib.Path(__file__).parents[2]
TARGET = f"{ROOT}/tests/tiny.py"
MINUTES = "timeout_min=5"

SBATCH = """#!/bin/bash
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
cp "$1" "$SLURM_STATES.sh"
export SLURM_JOB_ID=$$ SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
for task in $(seq 0 "${last:-0}"); do
    [ "$last" ] && export SLURM_ARRAY_JOB_ID=$$ SLURM_ARRAY_TASK_ID=$task
    bash "$1" > /dev/null 2>&1 &
done
echo "Submitted batch job $$"
"""
SRUN = '#!/bin/bash\nexec "${@:6}"\n'  # what follows --unbuffered --output FILE --error FILE
SACCT = '#!/bin/bash\necho "JobID|State|NodeList"; cat "$SLURM_STATES"\n'


@pytest.fixture
def states(tmp_path, monkeypatch):
    """A cluster that runs what it is given at once; the returned file says what sacct knows of other jobs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    states = tmp_path / "states"
    states.write_text("")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_STATES", str(states))
    return states


def run(common, cluster, fresh=False, settings=(MINUTES,)):
    """Rows and notes, in order of points."""
    points, notes = sweep.plan(TARGET, common, "cpu", fresh), {}
    jobs = slurm.executor(points, settings, parallel=1, cluster=cluster)
    rows = dict(slurm.run(jobs, points, fresh, notes.__setitem__, poll_seconds=0.1))
    return [rows[0], rows[1]], [notes[0], notes[1]]


def ran(row):
    return len((pathlib.Path(row["folder"]) / "ran").read_text().splitlines())


def test_local_jobs_give_the_rows_that_the_sweep_gives_here(fake):
    rows, _ = run(fake, "local")
    assert [ran(row) for row in rows] == [1, 1]
    assert rows == [row for _, row in sweep.run(sweep.plan(TARGET, fake, "cpu", False), True, 1, lambda *_: None)]


def test_array_of_slurm_jobs(fake, states):
    (good, bad), notes = run(fake, "slurm", settings=(MINUTES, "slurm_partition=long", "gpus_per_node=2"))
    assert (good["status"], bad["status"]) == ("ok", "killed by SIGKILL")
    assert re.fullmatch(r"job (\d+)_0 job \1_1", " ".join(notes))
    script = (states.parent / "states.sh").read_text()
    for line in ("--array=0-1%1", "--partition=long", "--gpus-per-node=2", "--time=5", "--job-name=tiny"):
        assert f"#SBATCH {line}\n" in script

    # Started again, it submits the point that failed, alone.
    rows, notes = run(fake, "slurm")
    assert re.fullmatch(r"finished before job \d+", " ".join(notes))
    assert [ran(row) for row in rows] == [1, 2]
    rows, notes = run(fake, "slurm", fresh=True)
    assert [ran(row) for row in rows] == [1, 1]  # the folders are new


def test_jobs_of_an_earlier_submission_are_waited_for(fake, states, monkeypatch):
    monkeypatch.setattr(submitit.SlurmJob, "_results_timeout_s", 0)  # seconds for a slow file system to show a result
    points = sweep.plan(TARGET, fake, "cpu", fresh=False)
    for place, point in enumerate(points):
        point.folder.mkdir(parents=True)
        (point.folder / slurm.JOB).write_text(f"55_{place}")
    states.write_text("55_0|RUNNING|n1\n55_1|PENDING|\n")
    with pytest.raises(ConfigError, match="--fresh: jobs 55_0, 55_1 still work on these points"):
        run(fake, "slurm", fresh=True)

    def note(place, text):
        assert text == f"job 55_{place}"
        states.write_text("55_0|CANCELLED|n1\n55_1|NODE_FAIL|\n")
        submitit.SlurmJob.watcher.clear()  # else it asks sacct again only after a while

    jobs = slurm.executor(points, [MINUTES], parallel=0)
    rows = dict(slurm.run(jobs, points, False, note, poll_seconds=0.1))
    assert [rows[0]["status"], rows[1]["status"]] == ["job cancelled", "job node_fail"]
    assert (points[0].folder / rows[0]["message"].removeprefix("see ")).name == "55_0_0_log.err"
    assert not any((point.folder / "ran").exists() for point in points)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["partition"], "--job=partition: must be name=value"),
        (["slurm_partition=long"], "--job: must say timeout_min"),
        ([MINUTES, "slurm_partiton=long"], "Unknown argument 'partiton'"),
        (["timeout_min=soon"], "timeout_min"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fake, states, settings, message):
    points = sweep.plan(TARGET, fake, "cpu", fresh=False)
    with pytest.raises(ConfigError, match=message):
        slurm.executor(points, settings, parallel=0)


def test_absence_of_slurm_is_told(fake, monkeypatch):
    monkeypatch.setenv("PATH", "")
    points = sweep.plan(TARGET, fake, "cpu", fresh=False)
    with pytest.raises(ConfigError, match="are you indeed on a slurm cluster"):
        slurm.executor(points, [MINUTES], parallel=0)
