"""Runs the points of a sweep on a Slurm cluster, through submitit: an array of jobs, one for each unfinished point.

A job that is preempted, runs out of time or is told to stop otherwise (SIGUSR1, SIGUSR2, SIGTERM, SIGINT) has its run
save the step, is queued again, and goes on from there; `scancel --signal=KILL` ends one for good. The jobs outlive the
process that submitted them: started again, it waits for those that are still queued or running. A point that is after
others is a job that depends on theirs; where one of them failed, its row says that it was skipped.
"""

import ast
import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import submitit

from research import errors, exits
from research.errors import ConfigError
from research.runs import files
from research.runs.folder import SUMMARY, in_use
from research.sweeps import children, sweep
from research.sweeps.experiment import Row

JOB = "job_id"  # file in a point's folder
_LOGS = "jobs"  # folder beside the points' own
_POLL_SECONDS = 10.0
_MOST_TIMEOUTS = 10**6  # a run of many days in jobs of some hours

_JOBS = {"slurm": submitit.SlurmJob, "local": submitit.LocalJob}


class _Task(submitit.helpers.Checkpointable):
    """What a job does, from the start or from a checkpoint: which, the run's folder says.

    submitit answers a signal by queueing the job again and leaving, whatever still runs. So while the run does, signals
    are the run's, and only when it has saved its step and ended, submitit's answer is asked for.
    """

    def __call__(self, point: sweep.Point) -> Row:
        if reason := sweep.held_back(point):  # Slurm let it start when that one's job had ended, however that did
            return sweep.skipped(point, *reason)
        with children.Children(patient=True) as started:
            row = sweep.run_point(point, fresh=False, started=started)
        if row["status"] == errors.INTERRUPTED:
            _requeue()
        return row


def _requeue() -> None:
    """Queues this job again and leaves it, as submitit does at the end of its time; returns outside a job.

    Raises:
      SystemExit: the job is over, for now; it leaves no result, so that nobody takes it for complete.
      submitit.core.utils.UncompletedJobError: it ran out of time too often.
    """
    number = submitit.JobEnvironment._usr_sig()
    answer = signal.getsignal(number)
    if not callable(answer):
        return
    try:
        answer(number, None)
    except (OSError, subprocess.SubprocessError) as error:  # Slurm does it by itself, as after preemption, or refuses
        print(f"not queued again by the job itself: {error}", file=sys.stderr)
    sys.exit(exits.INTERRUPTED)  # of several tasks the first alone has submitit leave


def executor(
    points: list[sweep.Point], settings: Sequence[str], parallel: int, cluster: str = "slurm"
) -> submitit.AutoExecutor:
    """What submits the jobs of these points.

    Args:
      points: a sweep's.
      settings: `name=value` each, as `submitit.AutoExecutor.update_parameters` names them: timeout_min (minutes),
        gpus_per_node, cpus_per_task, mem_gb, and Slurm's own as slurm_partition, slurm_account and so on.
      parallel: jobs that run at a time; 0 for as many as Slurm will.
      cluster: 'slurm', or 'local' for processes on this machine.

    Raises:
      ConfigError: a setting is unknown, the time limit is missing, or there is no Slurm here.
    """
    values = dict(_setting(text) for text in settings)
    if "timeout_min" not in values:
        raise ConfigError("--job: must say timeout_min, the minutes after which a job is checkpointed and queued again")
    if parallel:
        values["slurm_array_parallelism"] = parallel
    folder = points[0].folder.parent / _LOGS
    try:
        made = submitit.AutoExecutor(folder, cluster=cluster, **{f"{cluster}_max_num_timeout": _MOST_TIMEOUTS})
        made.update_parameters(name=folder.parent.name, **values)
    except (AssertionError, NameError, RuntimeError) as error:  # what submitit raises, Slurm's absence last
        raise ConfigError(f"--job={','.join(settings)}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    return made


def run(
    made: submitit.AutoExecutor,
    points: list[sweep.Point],
    fresh: bool,
    note: sweep.Note,
    poll_seconds: float = _POLL_SECONDS,
) -> Iterator[tuple[int, Row]]:
    """Submits what has not finished and is not in the queue; yields place and row of each point as it ends.

    Raises:
      ConfigError: `fresh`, while jobs of an earlier submission are queued or running; or points must wait for others,
        and the jobs are not Slurm's, which knows how to.
    """
    jobs = {place: job for place, point in enumerate(points) if (job := _in_queue(made, point))}
    if fresh and jobs:
        held = ", ".join(job.job_id for job in jobs.values())
        raise ConfigError(f"--fresh: jobs {held} still work on these points; cancel them first")
    missing = [place for place, point in enumerate(points) if not point.finished and place not in jobs]
    names = {points[place].folder.name for place in (*missing, *jobs)}
    if made.cluster != "slurm" and any(names.intersection(points[place].after) for place in missing):
        raise ConfigError(f"jobs on {made.cluster!r} start in no order, but points are after others; must be 'slurm'")
    for place in missing:
        _prepare(points[place], fresh)
    for ready, dependency in _in_order(points, missing, jobs):
        with _depending(made, dependency):
            submitted = made.map_array(_Task(), [points[place] for place in ready])
        jobs |= dict(zip(ready, submitted, strict=True))
    for place, point in enumerate(points):
        if place in jobs:
            files.write_text(point.folder / JOB, jobs[place].job_id)
            note(place, f"job {jobs[place].job_id}")
        else:
            note(place, sweep.FINISHED_BEFORE)
            yield place, sweep.row(point)
    places = {job.job_id: place for place, job in jobs.items()}
    for job in submitit.helpers.as_completed([*jobs.values()], poll_frequency=poll_seconds):
        place = places[job.job_id]
        yield place, _result(job, points[place])


def _in_order(
    points: list[sweep.Point], missing: list[int], jobs: dict[int, submitit.Job]
) -> Iterator[tuple[list[int], str]]:
    """Places to be submitted together, and what they depend on, as sbatch writes it; `jobs` is to grow meanwhile."""
    names = {point.folder.name: place for place, point in enumerate(points)}
    waiting = list(missing)
    while waiting:
        groups: dict[str, list[int]] = {}
        for place in waiting:
            before = [names[name] for name in points[place].after if name in names]
            if not set(before) & set(waiting):
                ids = [jobs[other].job_id for other in before if other in jobs]
                groups.setdefault(":".join(["afterany", *ids]) if ids else "", []).append(place)
        waiting = [place for place in waiting if not any(place in group for group in groups.values())]
        yield from ((group, dependency) for dependency, group in groups.items())


@contextlib.contextmanager
def _depending(made: submitit.AutoExecutor, dependency: str) -> Iterator[None]:
    """Jobs submitted meanwhile start after these, and after those that a setting names already."""
    if not dependency:
        yield
        return
    given = made.parameters.get("dependency")
    made.update_parameters(slurm_dependency=f"{given},{dependency}" if given else dependency)
    try:
        yield
    finally:
        made.update_parameters(slurm_dependency=given)


def _prepare(point: sweep.Point, fresh: bool) -> None:
    """Clears what an earlier run left that must not be taken for the next one's.

    Raises:
      ConfigError: the run is at work elsewhere.
    """
    if owner := in_use(point.folder):
        raise ConfigError(f"{point.folder} is in use by {owner}; wait until it ends, or stop it")
    if fresh:
        shutil.rmtree(point.folder, ignore_errors=True)
    point.folder.mkdir(parents=True, exist_ok=True)
    (point.folder / SUMMARY).unlink(missing_ok=True)


def _result(job: submitit.Job, point: sweep.Point) -> Row:
    try:
        return job.result()
    except submitit.core.utils.UncompletedJobError:  # the node died, or the job was cancelled
        sweep.record_death(point, f"job {job.state.lower()}", f"see {job.paths.stderr}")
        return sweep.row(point)


def _in_queue(made: submitit.AutoExecutor, point: sweep.Point) -> submitit.Job | None:
    """The point's job of an earlier submission, if it has not ended."""
    path = point.folder / JOB
    if point.finished or not path.exists():
        return None
    job = _JOBS[made.cluster](made.folder, path.read_text(encoding="utf-8"))
    return None if job.done(force_check=True) else job


def _setting(text: str) -> tuple[str, int | float | str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"--job={text}: must be name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a word
        return name, value
