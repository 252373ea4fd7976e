"""Runs the points of an experiment's sweep, each in a process of its own; see `slurm` and `agents` for other machines.

A crash, whatever takes it down, costs one point. Points lie in `<run.root>/<sweep>/<point>`; one that has finished is
not run again, one that was killed goes on from its checkpoint, one that failed is tried again.
"""

import concurrent.futures
import dataclasses
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import ml_collections

from research import experiment
from research.config import ConfigError, validate
from research.runs import files
from research.runs.folder import CONFIG, SUMMARY
from research.training import run as run_lib

Note = Callable[[int, str], None]  # is told what happens to the point at a place
FINISHED_BEFORE = "finished before"

_TRAIN = pathlib.Path(__file__).parents[1] / "launch" / "train.py"


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of a sweep.

    Attributes:
      overrides: what the experiment's sweep sets.
      folder: where the run is recorded.
      layers: the pattern of attention kinds, by which results are grouped.
      command: what trains it.
      finished: whether the folder holds its results already.
    """

    overrides: experiment.Overrides
    folder: pathlib.Path
    layers: tuple[str, ...]
    command: tuple[str, ...]
    finished: bool


def plan(target: str, common: experiment.Overrides, platform: str, fresh: bool) -> list[Point]:
    """The points of a sweep, each checked before any is run.

    Args:
      target: the experiment and its argument, `experiments/x.py:arg`.
      common: overrides for all points.
      platform: where they will run: 'cpu', 'gpu' or 'tpu'.
      fresh: whether to run them all anew.

    Raises:
      ConfigError: a point is invalid, or its folder holds a run with other settings; names every such point.
    """
    module, arg = experiment.load(target)
    points, problems = [], []
    for overrides in module.sweep(arg):
        try:
            points.append(_point(target, module.get_config(arg), common, overrides, platform, fresh))
        except (ConfigError, NotImplementedError) as error:
            problems.append(f"\n  {experiment.label(overrides)}: {error}")
    if problems:
        raise ConfigError(f"{len(problems)} of the points of {target} cannot be run:{''.join(problems)}")
    return points


def configs(
    target: str, common: experiment.Overrides, platform: str, *, checks_memory: bool = True
) -> list[tuple[experiment.Overrides, ml_collections.ConfigDict]]:
    """The points of a sweep as overrides and configs, each checked; arguments as `validate` has them.

    Raises:
      ConfigError: a point is invalid; names every such point.
    """
    module, arg = experiment.load(target)
    found, problems = [], []
    for overrides in module.sweep(arg):
        config = module.get_config(arg)
        try:
            experiment.override(config, common | overrides)
            validate(config, platform, checks_memory=checks_memory)
            found.append((overrides, config))
        except (ConfigError, NotImplementedError) as error:
            problems.append(f"\n  {experiment.label(overrides)}: {error}")
    if problems:
        raise ConfigError(f"{len(problems)} of the points of {target} cannot be run:{''.join(problems)}")
    return found


def _point(target, config, common, overrides, platform, fresh) -> Point:
    if twice := sorted(common.keys() & {*overrides, "run.id"}):
        raise ConfigError(f"config.{twice[0]}: is set by the sweep itself")
    experiment.override(config, common | overrides)
    validate(config, platform)
    root = pathlib.Path(config.run.root) / folder_name(target, common)
    place = {"run.root": str(root), "run.id": experiment.label(overrides)}
    folder = root / place["run.id"]
    flags = experiment.as_flags(common | overrides | place)
    summary = {} if fresh else files.read_json(folder / SUMMARY)
    stored = {} if fresh else files.read_json(folder / CONFIG)
    if stored and (changed := run_lib.differences(stored, run_lib.as_json(config))):
        raise ConfigError(f"{folder} holds a run with other settings ({'; '.join(changed)}); --fresh replaces it")
    command = (_from_here(sys.executable), _from_here(_TRAIN), f"--config={target}", *flags)
    return Point(overrides, folder, config.model.layers, command, summary.get("status") == run_lib.FINISHED)


def folder_name(target: str, common: experiment.Overrides) -> str:
    """The folder of a sweep below `run.root`: experiment, argument, and overrides that are common to all points."""
    path, _, arg = target.partition(":")
    return "-".join(part for part in (pathlib.Path(path).stem, arg, experiment.label(common)) if part)


def run(points: list[Point], fresh: bool, parallel: int, note: Note) -> Iterator[tuple[int, experiment.Row]]:
    """Runs points here, `parallel` at a time; yields place and row of each as it ends."""

    def run_one(place: int, point: Point) -> experiment.Row:
        note(place, FINISHED_BEFORE if point.finished else shlex.join(point.command))
        return run_point(point, fresh)

    with concurrent.futures.ThreadPoolExecutor(parallel) as pool:  # threads, for they only wait for processes
        futures = {pool.submit(run_one, place, point): place for place, point in enumerate(points)}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        finally:  # Ctrl-C reaches the running processes by itself; the other points must not follow
            pool.shutdown(wait=False, cancel_futures=True)


def run_point(point: Point, fresh: bool) -> experiment.Row:
    """Runs a point unless it has finished, and returns its row."""
    if not point.finished:
        if fresh:
            shutil.rmtree(point.folder, ignore_errors=True)
        point.folder.mkdir(parents=True, exist_ok=True)
        (point.folder / SUMMARY).unlink(missing_ok=True)
        with open(point.folder / "log.txt", "ab") as log:
            code = subprocess.run(point.command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        # Where not even Python lived to tell.
        record_death(point, f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}", "log.txt")
    return row(point)


def record_death(point: Point, status: str, log: str) -> None:
    """Writes the summary of a point that ended without one; `log` is the file that may say more."""
    if not (point.folder / SUMMARY).exists():
        point.folder.mkdir(parents=True, exist_ok=True)
        death = {"status": status, "message": f"see {point.folder / log}"}
        files.write_json(point.folder / SUMMARY, death)


def row(point: Point) -> experiment.Row:
    """A point with the summary of its run, however that ended."""
    return {
        "point": point.folder.name,
        **files.read_json(point.folder / SUMMARY),
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
    """The platform on which the points will run: asked for in a process of its own, for a TPU serves one at a time."""
    command = (sys.executable, "-c", "from research.attention import backends; print(backends.platform())")
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1]
