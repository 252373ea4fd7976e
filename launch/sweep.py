"""Runs an experiment's sweep: `python launch/sweep.py --config=experiments/mask_strategies.py:demo`.

Overrides of fields that the sweep sets narrow it to the points that have this value; others apply to all points and
name the folder, `--config.train.steps=5`: `research/sweeps/experiment.py` has the rule. A point that is after others
starts when they have finished, and is skipped if one has not. Started again, it runs only what has not finished;
`--fresh` runs everything again. Exits with 1 if a point failed or the results contradict the experiment's own check,
with 2, before anything is run, if a point is invalid, and with 75 if a point was stopped: SIGTERM or Ctrl-C lets the
running points save their step, starts no more, and records what is done; the same command goes on from there.

`--parallel=N` runs N points at a time, whose times then disturb one another. `--to=slurm` runs them as an array of
jobs, with `--job=NAME=VALUE` for each of their settings: `--job=timeout_min=240 --job=gpus_per_node=1`. `--to=wandb`
writes a sweep file for agents, and `--create` registers it.
"""

from __future__ import annotations

import pathlib
import sys
import types
from typing import TYPE_CHECKING

import rich.console
import rich.progress
from absl import flags as absl_flags

from launch import flags
from research import errors, exits
from research.errors import ConfigError
from research.runs import files
from research.sweeps import experiment

if TYPE_CHECKING:
    import submitit

    from research.sweeps import sweep

flags.define_config()
_TO = absl_flags.DEFINE_enum("to", "here", ["here", "slurm", "wandb"], "where the points are run")
_FRESH = absl_flags.DEFINE_bool("fresh", False, "run the finished points again, too")
_PARALLEL = absl_flags.DEFINE_integer("parallel", 0, "points at a time; 0: one here, as many as Slurm will there", 0)
_JOB = absl_flags.DEFINE_multi_string("job", [], "a setting of Slurm jobs, NAME=VALUE; see research/sweeps/slurm.py")
_CREATE = absl_flags.DEFINE_bool("create", False, "register the sweep with wandb")
_PLATFORM = absl_flags.DEFINE_enum(
    "platform", None, ["cpu", "gpu", "tpu"], "where points run, if not on a machine like this"
)

# Which flags say something, and where.
_USES = {
    "here": {"fresh", "parallel"},
    "slurm": {"fresh", "parallel", "job", "platform"},
    "wandb": {"create", "platform"},
}


def main() -> int:
    """Runs what the command line describes, and returns the exit code."""
    import jax

    from analysis import plot, table
    from research.sweeps import agents, slurm, sweep
    from research.training.run import FINISHED

    target, common, fresh = flags.target(), flags.overrides(), _FRESH.value
    platform = _PLATFORM.value or sweep.detect_platform()
    if _TO.value == "here" and _PARALLEL.value > 1 and platform != "cpu":
        raise ConfigError(
            f"--parallel={_PARALLEL.value}: one run takes every {platform} here; leave it out, or use --to"
        )
    jax.config.update("jax_platforms", "cpu")  # the accelerator is for the points
    points = sweep.plan(target, common, platform, fresh or _TO.value == "wandb")
    folder = points[0].folder.parent
    console = rich.console.Console(width=None if sys.stdout.isatty() else 150)
    if _TO.value == "wandb":
        return _hand_over(agents.describe(target, common, points, flags.config().wandb), folder, console)
    jobs = slurm.executor(points, _JOB.value, _PARALLEL.value) if _TO.value == "slurm" else None
    rows = _run(points, jobs, console)

    results, picture = folder / "results.jsonl", folder / "plot.png"
    known = _with_earlier(rows, results, target) if experiment.swept(target, common) else rows
    files.write_lines(results, known)
    module, _ = experiment.load(target)
    plot.draw(known, module.HEADLINE, f"{folder.name} on {platform}", picture)
    console.print(table.build(rows))
    if _TO.value == "here" and _PARALLEL.value > 1:
        console.print(f"{_PARALLEL.value} points ran at a time, so their times disturbed one another", style="italic")
    failed = [row for row in rows if row["status"] != FINISHED]
    for row in failed:
        console.print(f"{table.name(row)}: {row['status']}: {row['message']}", style="red", markup=False)
    stopped = sum(row["status"] == errors.INTERRUPTED for row in rows)
    agrees = bool(stopped) or _check(module, rows, console)  # of what is not all there nothing can be said
    console.print(f"results: {results}\nplot: {picture}", soft_wrap=True)
    if stopped:
        console.print(f"{stopped} of {len(rows)} points were stopped; the same command goes on with them")
        return exits.INTERRUPTED
    return exits.FINISHED if agrees and not failed else exits.FAILED


def _with_earlier(rows: list[experiment.Row], results: pathlib.Path, target: str) -> list[experiment.Row]:
    """A narrowed sweep's rows among those that earlier launches left of its other points, in the sweep's order."""
    earlier = files.read_lines(results)
    found = {row["point"]: row for row in (*earlier, *rows)}
    return [found[point.label] for point in experiment.points(target) if point.label in found]


def _check_flags() -> None:
    """Raises ConfigError where a flag has no effect with `--to`."""
    for name in set().union(*_USES.values()) - _USES[_TO.value]:
        if absl_flags.FLAGS[name].present:
            places = ", ".join(f"--to={place}" for place, names in _USES.items() if name in names)
            raise ConfigError(f"--{name}: has no effect with --to={_TO.value}, only with {places}")


def _hand_over(description: dict, folder: pathlib.Path, console: rich.console.Console) -> int:
    """Writes the file of a wandb sweep, and says or does what comes next."""
    import yaml

    from research.sweeps import agents

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sweep.yaml"
    files.write_text(path, yaml.safe_dump(description, sort_keys=False, width=2**16))
    if _CREATE.value:
        following = agents.create(description)
    else:
        following = f"wandb sweep {path}, and on each machine {agents.start_command('ENTITY/PROJECT/ID')}, as it says"
    console.print(f"sweep file: {path}\nnext: {following}", soft_wrap=True, markup=False)
    return 0


def _run(
    points: list[sweep.Point], jobs: submitit.AutoExecutor | None, console: rich.console.Console
) -> list[experiment.Row]:
    """Runs the points, as Slurm's jobs or here, showing the command of each and how far the sweep is."""
    from research.sweeps import slurm, sweep

    columns = (
        rich.progress.MofNCompleteColumn(),
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.description}"),
    )

    rows: dict[int, experiment.Row] = {}
    with rich.progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(points))

        def note(place: int, text: str) -> None:
            bar.update(task, description=points[place].folder.name)
            console.print(f"[{place + 1}/{len(points)}] {text}", markup=False, soft_wrap=True)

        here = sweep.run(points, _FRESH.value, _PARALLEL.value or 1, note)
        for place, row in slurm.run(jobs, points, _FRESH.value, note) if jobs else here:
            rows[place] = row
            bar.advance(task)
        bar.update(task, description="")
    return [rows[place] for place in range(len(points))]


def _check(module: types.ModuleType, rows: list[experiment.Row], console: rich.console.Console) -> bool:
    """Runs the experiment's own check, if it has one; whether the results passed."""
    if not hasattr(module, "check"):
        return True
    try:
        console.print(*module.check(rows), sep="\n", markup=False)
    except experiment.CheckError as error:
        console.print(f"check failed: {error}", style="red", markup=False)
        return False
    return True


if __name__ == "__main__":
    flags.run(main, check=_check_flags)
