"""Stop signals to a sweep and to Slurm's jobs: points save and end, none is left over, all go on."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from research import errors, exits
from research.runs.folder import owned, read_rows
from research.sweeps import children, slurm, sweep
from tests.launch.conftest import ROOT, descendants, fakes, is_alive, parent, results, told, wait_for

TARGET = f"{ROOT}/tests/tiny.py"


@pytest.fixture
def waiting(fake, monkeypatch):
    monkeypatch.setenv("FAKE_WAITS", "1")
    return fake


def ended(process):
    """Exit code, and all that it printed."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err


@pytest.mark.slow
def test_stopped_sweep_lets_its_points_save_and_starts_no_more(waiting, launched):
    root = waiting["run.root"]
    process = launched()
    (point,) = fakes(root)
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert code == 75, said
    assert not is_alive(point)
    assert told(root) == [["SIGTERM"]]
    rows = results(root)
    assert [row["status"] for row in rows] == ["interrupted"] * 2
    assert rows[0]["message"] == "SIGTERM after step 7 of 9, which is saved"
    assert rows[1]["message"] == "SIGTERM before it was started"
    assert "2 of 2 points were stopped; the same command goes on with them" in said
    assert "Traceback" not in said


def test_sweep_that_was_stopped_with_all_its_processes_goes_on_when_started_again(waiting, launched):
    root = waiting["run.root"]
    process = launched("--parallel=2")
    points = fakes(root, 2)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    code, said = ended(process)
    assert code == 75, said
    assert not any(map(is_alive, points))
    assert told(root) == [["SIGTERM"]] * 2  # once
    code, said = ended(launched())
    assert code == 0, said
    assert [row["status"] for row in results(root)] == ["ok"] * 2


def test_signal_that_comes_twice_at_once_is_one_signal(waiting, launched):
    """GNU's timeout sends it to the process and to its group."""
    process = launched(FAKE_DEAF="1")
    (point,) = fakes(waiting["run.root"])
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
    wait_for(lambda: told(waiting["run.root"]))
    time.sleep(0.3)
    assert is_alive(process.pid)
    assert is_alive(point)
    process.send_signal(signal.SIGHUP)  # another is taken for the same request
    time.sleep(exits.AGAIN_SECONDS)
    assert is_alive(point)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == -signal.SIGTERM
    wait_for(lambda: not is_alive(point))
    assert told(waiting["run.root"]) == [["SIGTERM"]]


@pytest.mark.slow
def test_second_interrupt_kills_what_does_not_end(waiting, launched):
    process = launched("--parallel=2", FAKE_DEAF="1")
    points = fakes(waiting["run.root"], 2)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: told(waiting["run.root"]) == [["SIGTERM"]] * 2)
    time.sleep(exits.AGAIN_SECONDS)
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] not in (0, 75)
    wait_for(lambda: not any(map(is_alive, points)))


@pytest.mark.skipif(sys.platform != "linux", reason="the promise is made for Linux")
def test_points_of_a_killed_sweep_save_and_end(waiting, launched):
    process = launched("--parallel=2")
    points = fakes(waiting["run.root"], 2)
    process.kill()
    wait_for(lambda: not any(map(is_alive, points)))
    assert told(waiting["run.root"]) == [["SIGTERM"]] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="the promise is made for Linux")
def test_nothing_is_started_for_a_parent_that_has_died(tmp_path):
    """The time between a process's start and its request to be told is covered, too."""
    made = tmp_path / "made"
    command = [sys.executable, "-c", children._BOUND, "1", "touch", made]  # 1: not the parent
    assert subprocess.run(command, check=False).returncode == 75
    assert not made.exists()


def test_point_that_another_process_works_on_is_told_and_left_alone(waiting):
    """A sweep that was killed where its points were not told, say: the lock of the run's folder refuses."""
    points = sweep.plan(TARGET, waiting, "cpu", fresh=False)
    points[0].folder.mkdir(parents=True)
    (points[0].folder / "owner").touch()
    (points[0].folder / "log.txt").write_text("what the other one said\n")
    with children.Children() as started:
        row = sweep.run_point(points[0], False, started)
    assert row["status"] == "in use"
    assert row["message"] == "a folder is in use by process 1 on some host"
    assert not (points[0].folder / "summary.json").exists()
    assert (points[0].folder / "log.txt").read_text().startswith("what the other one said\n")


def test_point_that_another_process_works_on_is_not_replaced(waiting):
    points = sweep.plan(TARGET, waiting, "cpu", fresh=True)
    with owned(points[0].folder), children.Children() as started:
        row = sweep.run_point(points[0], True, started)
        assert (points[0].folder / "lock").exists()
    assert row["status"] == "in use"
    assert f"in use by process {os.getpid()} on " in row["message"]


def test_summary_of_an_earlier_attempt_is_not_taken_for_this_ones(fake):
    (_, point) = sweep.plan(TARGET, fake, "cpu", fresh=False)
    point.folder.mkdir(parents=True)
    (point.folder / "summary.json").write_text('{"status": "nan loss", "message": "of the first attempt"}')
    with children.Children() as started:
        row = sweep.run_point(point, False, started)
    assert row["status"] == "killed by SIGKILL"


def test_stop_before_a_run_heeds_signals_loses_nothing_and_is_told(fake, tmp_path, monkeypatch):
    """It was starting Python, say."""
    script = tmp_path / "deaf.py"
    script.write_text("import time, sys, pathlib\npathlib.Path(sys.argv[0] + '.runs').touch()\ntime.sleep(600)")
    monkeypatch.setattr(sweep, "_TRAIN", script)
    points = sweep.plan(TARGET, fake, "cpu", fresh=False)

    def interrupt():
        wait_for((tmp_path / "deaf.py.runs").exists)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=interrupt)
    thread.start()
    rows = dict(sweep.run(points, False, 1, lambda *_: None))
    thread.join()
    assert [row["status"] for row in rows.values()] == [errors.INTERRUPTED] * 2
    assert rows[0]["message"] == "SIGUSR1 before its first step or after its last"
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_ignored_signals_stay_ignored(monkeypatch):
    """As nohup and shells that run a command in the background leave them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with children.Children() as started:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not started.stopped
            os.kill(os.getpid(), signal.SIGTERM)
            assert started.stopped == "SIGTERM"
    finally:
        signal.signal(signal.SIGHUP, before)


def jobs_in_the_background(points, settings=("timeout_min=5",)):
    """Submits local jobs and waits for them in a thread; returns it and where the rows come."""
    rows = {}
    made = slurm.executor(points, settings, parallel=0, cluster="local")

    def wait():
        rows.update(slurm.run(made, points, False, lambda *_: None, poll_seconds=0.1))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, rows


@pytest.mark.slow
@pytest.mark.parametrize("names", [("SIGUSR2", "SIGTERM"), pytest.param(("SIGUSR1", "SIGINT"), marks=pytest.mark.slow)])
def test_stopped_jobs_save_and_are_queued_again(waiting, names):
    points = sweep.plan(TARGET, waiting, "cpu", fresh=False)
    thread, rows = jobs_in_the_background(points)
    processes = fakes(waiting["run.root"], 2)
    for process, name in zip(processes, names, strict=True):
        os.kill(parent(process), getattr(signal, name))
    thread.join(timeout=120)
    assert not any(map(is_alive, processes))
    assert told(waiting["run.root"]) == [["SIGTERM"]] * 2
    for place, point in enumerate(points):
        assert rows[place]["status"] == "ok"  # of its second start
        assert len((point.folder / "ran").read_text().splitlines()) == 2


@pytest.mark.slow
def test_run_that_was_stopped_itself_is_queued_again(waiting):
    """The signal reached it and not the job, or it by another way."""
    points = sweep.plan(TARGET, waiting, "cpu", fresh=False)[:1]
    thread, rows = jobs_in_the_background(points)
    (process,) = fakes(waiting["run.root"])
    os.kill(process, signal.SIGUSR1)
    thread.join(timeout=120)
    assert rows[0]["status"] == "ok"
    assert len((points[0].folder / "ran").read_text().splitlines()) == 2


def test_what_is_patient_is_not_hurried_by_further_signals(tmp_path, monkeypatch):
    """At the end of a job's time Slurm sends SIGUSR2, then SIGTERM, and at last kills; the run may need all of it."""
    monkeypatch.setattr(exits, "AGAIN_SECONDS", 0.0)
    monkeypatch.setenv("READY", str(tmp_path / "ready"))
    slow = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(75)))\n"
        "pathlib.Path(os.environ['READY']).touch()\n"
        "time.sleep(600)"
    )

    def hurry():
        wait_for((tmp_path / "ready").exists)
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    thread = threading.Thread(target=hurry)
    thread.start()
    with children.Children(patient=True) as started:
        assert started.run([sys.executable, "-c", slow], tmp_path / "log") == 75
    thread.join()
    assert started.stopped == "SIGUSR2"


def steps(folder):
    return [row["step"] for row in read_rows(folder)]


def lines(path):
    return path.read_bytes().count(b"\n")


def kept(folder):
    """The steps that are saved."""
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal())


CALM = """
from tests.tiny import *
def sweep(arg=""):
    return [{"optimizer.learning_rate": rate} for rate in (1e-3, 2e-3)]
"""
ENDLESS = {"train.steps": 10**6, "train.checkpoint_every": 0, "train.eval_every": 0}


@pytest.mark.slow
def test_real_runs_of_a_stopped_sweep_save_their_step_and_go_on(tmp_path):
    (tmp_path / "calm.py").write_text(CALM)
    command = [sys.executable, ROOT / "launch" / "sweep.py", f"--config={tmp_path}/calm.py", "--parallel=2"]
    command += [f"--config.{name}={value}" for name, value in (ENDLESS | {"run.root": tmp_path / "runs"}).items()]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    printed = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = {}
    for _ in range(2):
        process = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True, **printed)
        wait_for(
            lambda: (
                sum(lines(path) > done.get(path.parent, 0) for path in tmp_path.glob("runs/*/*/metrics.jsonl")) == 2
            ),
            300,
        )
        all_of_it = descendants(process.pid)
        os.killpg(process.pid, signal.SIGTERM)
        code, said = ended(process)
        assert code == 75, said
        assert not any(map(is_alive, all_of_it))
        for folder in tmp_path.glob("runs/*/*/"):
            assert steps(folder) == list(range(1, len(steps(folder)) + 1))
            assert kept(folder)[-1:] == steps(folder)[-1:]
            assert len(steps(folder)) > done.get(folder, 0)
            done[folder] = len(steps(folder))
        assert len(done) == 2


@pytest.mark.slow
def test_real_run_is_saved_at_the_end_of_its_jobs_minute_and_goes_on_in_the_next(tmp_path):
    """submitit's local executor sends SIGUSR2 half a minute before the end, and starts the job again."""
    points = sweep.plan(TARGET, ENDLESS | {"run.root": str(tmp_path)}, "cpu", fresh=False)[:1]
    folder, log = points[0].folder, points[0].folder / "log.txt"
    jobs_in_the_background(points, ["timeout_min=1"])
    job = int(wait_for(lambda: (folder / slurm.JOB).exists() and (folder / slurm.JOB).read_text()))
    try:
        (saved,) = wait_for(lambda: [step for step in kept(folder) if step], seconds=300)
        assert f"SIGTERM after step {saved} of" in wait_for(log.read_text)
        wait_for(lambda: f"resumed after step {saved}\n" in log.read_text(), seconds=120)
        (controlled,) = (number for number in descendants(job) if parent(number) == job)
        (run,) = (number for number in descendants(job) if parent(number) == controlled)
        wait_for(lambda: steps(folder)[-1] > saved)
    finally:
        for number in (job, *descendants(job)[:1]):  # which would start it again; the run is told by Linux
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
    wait_for(lambda: not is_alive(run))
    assert steps(folder) == list(range(1, kept(folder)[-1] + 1))
    assert kept(folder)[-1] > saved
