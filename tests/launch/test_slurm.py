"""Sweeps as jobs: through submitit's local executor, and its Slurm one with programs that stand in for Slurm's."""

import os
import pathlib
import re
import signal
import threading

import pytest
import submitit

from research.errors import ConfigError
from research.sweeps import slurm, sweep
from tests.launch.conftest import fakes, is_alive, parent, told, wait_for

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
# Starts the job again when the process that asks for it has ended.
SCONTROL = """#!/bin/bash
echo "$@" >> "$SLURM_STATES.asked"
[ "$SLURM_REFUSES" ] && exit 1
(while kill -0 $PPID; do sleep 0.05; done; exec bash "$SLURM_STATES.sh") > /dev/null 2>&1 &
"""
SACCT = '#!/bin/bash\necho "JobID|State|NodeList"; cat "$SLURM_STATES"\n'


@pytest.fixture
def states(tmp_path, monkeypatch):
    """A cluster that runs what it is given at once; the returned file says what sacct knows of other jobs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "sacct": SACCT}.items():
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


@pytest.mark.slow
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


def one_job(fake, process_says):
    """Rows of one job on the cluster, told of its run's process when that waits to be stopped."""
    points = sweep.plan(TARGET, fake, "cpu", fresh=False)[:1]
    jobs = slurm.executor(points, [MINUTES], parallel=0)

    def stop():
        (process,) = fakes(fake["run.root"])
        process_says(process, (points[0].folder / slurm.JOB).read_text())

    thread = threading.Thread(target=stop)
    thread.start()
    (row,) = dict(slurm.run(jobs, points, False, lambda *_: None, poll_seconds=0.1)).values()
    thread.join()
    return row


def test_job_out_of_time_is_queued_again_when_its_run_has_saved(fake, states, monkeypatch):
    monkeypatch.setenv("FAKE_WAITS", "1")
    asked = states.with_name("states.asked")

    def out_of_time(process, job):
        assert not asked.exists()
        os.kill(parent(process), signal.SIGUSR2)
        wait_for(lambda: asked.exists() and asked.read_text() == f"requeue {job}\n")
        assert not is_alive(process)

    row = one_job(fake, out_of_time)
    assert row["status"] == "ok"  # of its second start
    assert ran(row) == 2
    assert told(fake["run.root"]) == [["SIGTERM"]]


@pytest.mark.slow
def test_job_that_slurm_does_not_queue_again_for_us_is_not_complete(fake, states, monkeypatch):
    """As after a preemption, when Slurm queues it again by itself, or a cancellation."""
    monkeypatch.setenv("FAKE_WAITS", "1")
    monkeypatch.setenv("SLURM_REFUSES", "1")
    monkeypatch.setattr(submitit.SlurmJob, "_results_timeout_s", 0)

    def cancel(process, job):
        supervisor = parent(process)
        os.kill(supervisor, signal.SIGTERM)
        wait_for(lambda: not is_alive(supervisor))
        assert states.with_name("states.asked").read_text() == f"requeue {job}\n"
        states.write_text(f"{job}|CANCELLED|n1\n")

    row = one_job(fake, cancel)
    assert (row["status"], row["message"]) == ("interrupted", "SIGTERM after step 7 of 9, which is saved")


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
