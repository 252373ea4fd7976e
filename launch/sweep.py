"""Runs an experiment's sweep: `python launch/sweep.py --config=experiments/mask_strategies.py:demo`.

Further overrides apply to all points: `--config.train.steps=5`. Started again, it runs only what has not finished;
`--fresh` runs everything again. Exits with 1 if a point failed or the results contradict the experiment's own check,
and with 2, before anything is run, if a point is invalid.
"""

import json
import shlex
import sys

import jax
import rich.console
import rich.progress
from absl import flags as absl_flags

from analysis import plot, table
from launch import flags
from research import experiment, sweep
from research.training.run import FINISHED

_FRESH = absl_flags.DEFINE_bool("fresh", False, "run the finished points again, too")


def main() -> int:
    """Runs what the command line describes, and returns the exit code."""
    target, common, fresh = flags.target(), flags.overrides(), _FRESH.value
    platform = sweep.detect_platform()
    jax.config.update("jax_platforms", "cpu")  # the accelerator is for the points
    points = sweep.plan(target, common, platform, fresh)
    console = rich.console.Console(width=None if sys.stdout.isatty() else 150)
    rows = _run(points, fresh, console)

    folder = points[0].folder.parent
    results, picture = folder / "results.jsonl", folder / "plot.png"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    module, _ = experiment.load(target)
    plot.draw(rows, module.HEADLINE, f"{folder.name} on {platform}", picture)
    console.print(table.build(rows))
    failed = [row for row in rows if row["status"] != FINISHED]
    for row in failed:
        console.print(f"{table.name(row)}: {row['status']}: {row['message']}", style="red", markup=False)
    agrees = _check(module, rows, console)
    console.print(f"results: {results}\nplot: {picture}", soft_wrap=True)
    return 0 if agrees and not failed else 1


def _run(points: list[sweep.Point], fresh: bool, console: rich.console.Console) -> list[experiment.Row]:
    """Runs the points, showing the command of each and how far the sweep is."""
    columns = (
        rich.progress.MofNCompleteColumn(),
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.description}"),
    )
    rows = []
    with rich.progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(points))
        for number, point in enumerate(points, 1):
            bar.update(task, description=point.folder.name)
            note = "finished before" if point.finished else shlex.join(point.command)
            console.print(f"[{number}/{len(points)}] {note}", markup=False, soft_wrap=True)
            rows.append(sweep.run_point(point, fresh))
            bar.advance(task)
        bar.update(task, description="")
    return rows


def _check(module, rows: list[experiment.Row], console: rich.console.Console) -> bool:
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
    flags.run(main)
