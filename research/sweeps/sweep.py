"""Runs the points of an experiment's sweep, each in a process of its own; see `slurm` and `agents` for other machines.

A crash, whatever takes it down, costs one point. Points lie in `<run.root>/<sweep>/<point>`; one that has finished is
not run again, one that was killed or stopped goes on from its checkpoint, one that failed is tried again.

One file: planning decides by a folder's content what running will do with it.
"""

import concurrent.futures
import dataclasses
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from research import errors, exits
from research.errors import ConfigError
from research.runs import files
from research.runs.folder import CONFIG, FINISHED, SUMMARY, in_use
from research.settings import fields
from research.settings.config import Settings, is_idle, read
from research.sweeps import children, experiment
from research.validation import validate

Note = Callable[[int, str], None]  # is told what happens to the point at a place
FINISHED_BEFORE = "finished before"
_LOG = "log.txt"  # what a point printed, in its folder
# As which a launcher tells what it foresaw, in a line.
_FORESEEN = (
    *(errors.INVALID, errors.UNSUPPORTED, errors.OUT_OF_MEMORY, errors.NAN_LOSS, errors.DISK_FULL),
    *(errors.UNREACHABLE, errors.INTERRUPTED, errors.IN_USE, errors.DAMAGED),
)

_TRAIN = pathlib.Path(__file__).parents[2] / "launch" / "train.py"


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of a sweep.

    Attributes:
      overrides: what the experiment's sweep sets.
      folder: where the run is recorded.
      layers: the pattern of attention kinds, by which results are grouped.
      command: what trains it.
      finished: whether the folder holds its results already.
      after: the labels of points that must have finished before it starts; their folders lie beside its own.
    """

    overrides: fields.Overrides
    folder: pathlib.Path
    layers: tuple[str, ...]
    command: tuple[str, ...]
    finished: bool
    after: tuple[str, ...] = ()


def plan(target: str, common: fields.Overrides, platform: str, fresh: bool) -> list[Point]:
    """The points of a sweep, each checked before any is run.

    Args:
      target: the experiment and its argument, `experiments/x.py:arg`.
      common: overrides; those of fields that the sweep sets narrow it, see `experiment`.
      platform: where they will run: 'cpu', 'gpu' or 'tpu'.
      fresh: whether to run them all anew.

    Raises:
      ConfigError: a point is invalid, or its folder holds a run with other settings; names every such point. No point
        is left, or one is after a point that is left out and has not finished.
    """
    points = _each(target, common, lambda point: _point(target, common, point, platform, fresh))
    _check_order(points)
    return points


def _each(target: str, common: fields.Overrides, make: Callable[[experiment.Point], Any]) -> list[Any]:
    """What `make` makes of the points of a sweep; raises ConfigError naming every point for which it fails."""
    made, problems, used = [], {}, set()
    found = experiment.points(target, common)
    for point in found:
        try:
            made.append(make(point))
            used |= settings_at(target, common, point)[0].keys()
        except (ConfigError, NotImplementedError) as error:
            problems[point.label] = str(error)
    if len(found) > 1 and len(problems) == len(found) and len(set(problems.values())) == 1:
        raise ConfigError(f"{problems[found[0].label]}; so it is at each of the {len(found)} points of {target}")
    if problems:
        lines = "".join(f"\n  {label}: {problem}" for label, problem in problems.items())
        raise ConfigError(f"{len(problems)} of the {len(found)} points of {target} cannot be run:{lines}")
    if unread := [name for name in common if name not in used]:
        raise ConfigError(f"config.{unread[0]}={common[unread[0]]}: no point of {target} has a layer that reads it")
    return made


def settings_at(target: str, common: fields.Overrides, point: experiment.Point) -> tuple[fields.Overrides, Settings]:
    """The settings of a point, and the overrides that make them of the experiment's config.

    Raises:
      ConfigError: a setting is impossible, or one that the point sets has no effect there.
    """
    config = experiment.config(target)
    fields.override(config, common | point.overrides)
    idle = {name for name in common if is_idle(name, (*config.model.prefix, *config.model.layers))}
    given = {name: value for name, value in (common | point.overrides).items() if name not in idle - {*point.overrides}}
    config = experiment.config(target)
    fields.override(config, given)
    settings = read(config)
    settings.refuse_idle(point.overrides)
    return given, settings


def _check_order(points: list[Point]) -> None:
    """Raises ConfigError where a point waits for one that overrides leave out, and that has not finished before."""
    there = {point.folder.name for point in points}
    for point in points:
        left_out = dataclasses.replace(point, after=tuple(name for name in point.after if name not in there))
        if not point.finished and (waits := held_back(left_out)):
            raise ConfigError(
                f"{point.folder.name}: is after {waits[0]}, which the overrides leave out and which has not finished "
                f"in {point.folder.parent}; run that first, or both at once"
            )


def held_back(point: Point) -> tuple[str, str] | None:
    """The first point that this one is after and that has not finished well, and how that stands; None: it may run."""
    for name in point.after:
        status = files.read_json(point.folder.parent / name / SUMMARY).get("status", "not run")
        if status != FINISHED:
            return name, status
    return None


def skipped(point: Point, name: str, status: str) -> experiment.Row:
    """The row of a point that is not run, for one that it is after did not finish well."""
    return _row(point, {"status": f"skipped: {name} failed", "message": f"it is after {name}, which ended: {status}"})


def point_settings(
    target: str, common: fields.Overrides, platform: str, *, checks_memory: bool = True
) -> list[tuple[fields.Overrides, Settings]]:
    """The points of a sweep as overrides and settings, each checked; `common` as in `plan`, the rest as in `validate`.

    Raises:
      ConfigError: a point is invalid; names every such point. Or no point is left.
    """

    def checked(point: experiment.Point) -> tuple[fields.Overrides, Settings]:
        _, settings = settings_at(target, common, point)
        validate(settings, platform, checks_memory=checks_memory)
        return point.overrides, settings

    return _each(target, common, checked)


def _point(target: str, common: fields.Overrides, point: experiment.Point, platform: str, fresh: bool) -> Point:
    given, settings = settings_at(target, common, point)
    validate(settings, platform)
    root = pathlib.Path(settings.run.root) / folder_name(target, common)
    place = {"run.root": str(root), "run.id": point.label}
    folder = root / place["run.id"]
    flags = experiment.as_flags(given | place)
    summary = {} if fresh else files.read_json(folder / SUMMARY)
    stored = {} if fresh else files.read_json(folder / CONFIG)
    if stored and (changed := fields.differences(stored, fields.as_json(settings))):
        raise ConfigError(f"{folder} holds a run with other settings ({'; '.join(changed)}); --fresh replaces it")
    command = (_from_here(sys.executable), _from_here(_TRAIN), f"--config={target}", *flags)
    finished = summary.get("status") == FINISHED
    layers = (*settings.model.prefix, *settings.model.layers)
    return Point(point.overrides, folder, layers, command, finished, point.after)


def folder_name(target: str, common: fields.Overrides) -> str:
    """The folder of a sweep below `run.root`: experiment, argument, and overrides of fields that no point sets.

    The others only choose among its points, which lie in one folder however they were chosen.
    """
    swept = experiment.swept(target, common)
    return full_name(target, {name: setting for name, setting in common.items() if name not in swept})


def full_name(target: str, common: fields.Overrides) -> str:
    """Experiment, argument, and all overrides."""
    path, _, arg = target.partition(":")
    return "-".join(part for part in (pathlib.Path(path).stem, arg, experiment.label(common)) if part)


def run(points: list[Point], fresh: bool, parallel: int, note: Note) -> Iterator[tuple[int, experiment.Row]]:
    """Runs points here, `parallel` at a time; yields place and row of each as it ends.

    A point starts when those that it is after have ended, and is skipped if one of them did not finish well. A stop
    signal, see `children`, is passed on to the points that run; the others are not started. The rows say so.
    """
    waiting = dict(enumerate(points))
    futures: dict[concurrent.futures.Future, int] = {}
    unfinished = {point.folder.name for point in points}

    def run_one(place: int, point: Point) -> experiment.Row:
        if started.stopped:
            return _row(point, _interrupted(f"{started.stopped} before it was started"))
        if not point.finished and (reason := held_back(point)):
            note(place, f"skipped: {reason[0]} failed")
            return skipped(point, *reason)
        note(place, FINISHED_BEFORE if point.finished else shlex.join(point.command))
        return run_point(point, fresh, started)

    # Threads, for they only wait for processes.
    with children.Children() as started, concurrent.futures.ThreadPoolExecutor(parallel) as pool:
        try:
            while waiting or futures:
                for place in [place for place, point in waiting.items() if unfinished.isdisjoint(point.after)]:
                    futures[pool.submit(run_one, place, waiting.pop(place))] = place
                done, _ = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    place = futures.pop(future)
                    unfinished.remove(points[place].folder.name)
                    yield place, future.result()
        except BaseException as error:  # the running points must end, and the others not follow
            started.stop(type(error).__name__)
            raise


def run_point(point: Point, fresh: bool, started: children.Children) -> experiment.Row:
    """Runs a point unless it has finished, and returns its row.

    A run writes its summary itself, where it owns its folder and lives to tell. Otherwise what is known of its end is
    written there, but not into a folder that another process is at work in, nor over a damaged file: this the row tells
    alone.
    """
    if point.finished:
        return row(point)
    if fresh and (owner := in_use(point.folder)):
        return _row(point, {"status": errors.IN_USE, "message": f"{point.folder} is in use by {owner}; not replaced"})
    if fresh:
        shutil.rmtree(point.folder, ignore_errors=True)
    point.folder.mkdir(parents=True, exist_ok=True)
    summary, log = point.folder / SUMMARY, point.folder / _LOG
    before, begin = _written(summary), log.stat().st_size if log.exists() else 0
    code = started.run(point.command, log)
    if summary.exists() and (code == exits.FINISHED or _written(summary) != before):
        return row(point)
    said = _foreseen(log, begin)
    if said.get("status") in (errors.IN_USE, errors.DAMAGED):
        return _row(point, said)
    if code == -signal.SIGTERM and started.stopped:  # it has no handler yet, or none any more
        said = _interrupted(f"{started.stopped} before its first step or after its last")
    summary.unlink(missing_ok=True)  # of an earlier attempt
    record_death(point, said.get("status", exits.told(code)), said.get("message", f"see {log}"))
    return row(point)


def record_death(point: Point, status: str, message: str) -> None:
    """Writes the summary of a point that ended without one."""
    if not (point.folder / SUMMARY).exists():
        point.folder.mkdir(parents=True, exist_ok=True)
        files.write_json(point.folder / SUMMARY, {"status": status, "message": message})


def _interrupted(message: str) -> dict[str, str]:
    return {"status": errors.INTERRUPTED, "message": message}


def _written(path: pathlib.Path) -> tuple[int, int] | None:
    """What tells one writing of a file from the next."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _foreseen(log: pathlib.Path, begin: int) -> dict[str, str]:
    """The last line by which a launcher told of a foreseen failure, in what follows `begin` bytes; else nothing."""
    with open(log, "rb") as file:
        file.seek(begin)
        found = re.findall(rf"^({'|'.join(_FORESEEN)}): (.*)$", file.read().decode(errors="replace"), re.MULTILINE)
    return dict(zip(("status", "message"), found[-1], strict=True)) if found else {}


def row(point: Point) -> experiment.Row:
    """A point with the summary of its run, however that ended."""
    return _row(point, files.read_json(point.folder / SUMMARY))


def _row(point: Point, summary: dict[str, Any]) -> experiment.Row:
    return {
        "point": point.folder.name,
        **summary,
        "overrides": point.overrides,
        "layers": point.layers,
        "folder": str(point.folder),
        "command": shlex.join(point.command),
    }


def _from_here(path: str | pathlib.Path) -> str:
    """The path as one would type it in the working folder."""
    here = pathlib.Path.cwd()
    return str(pathlib.Path(path).relative_to(here) if pathlib.Path(path).is_relative_to(here) else path)


def detect_platform() -> str:
    """The platform on which the points will run: asked for in a process of its own, for a TPU serves one at a time.

    Raises:
      ConfigError: as `devices.require`.
    """
    program = (
        "from research import devices, errors; import jax, sys\n"
        "try: devices.require()\n"
        "except errors.ConfigError as error: sys.exit(str(error))\n"
        "print(jax.default_backend())"
    )
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(done.stderr.strip().splitlines()[-1])
    return done.stdout.split()[-1]
