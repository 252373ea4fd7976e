"""What the launchers of measurements share: programs are measured, rows kept and shown."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import rich.box
import rich.console
import rich.progress
import rich.table
from absl import flags as absl_flags

from launch import flags
from research import exits
from research.errors import ConfigError
from research.settings.config import Settings
from research.sweeps import experiment

if TYPE_CHECKING:
    from research.measure.pipeline import Planned, Row

RESULTS = "results.jsonl"


def define_fresh() -> None:
    """Defines `--fresh`."""
    absl_flags.DEFINE_bool("fresh", False, "measure also what stands in the results")


def define_root() -> None:
    """Defines `--runs`, for what is measured without a config, which has `run.root`."""
    absl_flags.DEFINE_string("runs", "runs", "folder of all runs")


def root() -> str:
    """The folder that `--runs` names."""
    return str(pathlib.Path(absl_flags.FLAGS["runs"].value).expanduser())


def define_lengths(*default: str) -> None:
    """Defines `--lengths`."""
    absl_flags.DEFINE_list("lengths", list(default), "sequence lengths, tokens")


def lengths() -> list[int]:
    """The integers of `--lengths`.

    Raises:
      ConfigError: there are none, or one is not a positive integer.
    """
    texts = absl_flags.FLAGS["lengths"].value
    if not texts or not all(text.isdecimal() and int(text) > 0 for text in texts):
        raise ConfigError(f"--lengths={','.join(texts)}: must be positive integers, as 1024,4096")
    return [int(text) for text in texts]


def console(*, to_stderr: bool = False) -> rich.console.Console:
    """Where tables and progress go; to stderr where stdout is for rows."""
    return rich.console.Console(stderr=to_stderr, width=None if sys.stdout.isatty() else 160)


def folder(root: str, name: str, below: str) -> pathlib.Path:
    """Makes the folder of a measure's results, and records the start."""
    from research.runs.folder import environment, record_start

    path = pathlib.Path(root) / name / below
    path.mkdir(parents=True, exist_ok=True)
    record_start(path, environment())
    return path


class Measured(NamedTuple):
    """The rows of programs, and how many programs a stop signal left out."""

    rows: list[Row]
    left: int


def measure(
    planned: list[Planned],
    results: pathlib.Path,
    stamp: Row,
    console: rich.console.Console,
    each: Callable[[Row], None] = lambda row: None,
) -> Measured:
    """The rows of all programs, old and new, behind a progress bar; `each` is called with every row as it is there.

    A stop signal ends it after the rows that are there.
    """
    from research.measure import pipeline

    if absl_flags.FLAGS["fresh"].value:
        pipeline.forget(planned, results)
    rows, left = [], len(planned)
    with rich.progress.Progress(console=console) as bar, contextlib.suppress(_StoppedError), _stoppable():
        task = bar.add_task("", total=len(planned))
        following = pipeline.measured(planned, results, stamp)
        for program, overrides, _ in planned:
            bar.update(task, description=f"{program.what} {experiment.label(overrides)}"[:100])
            for row in next(following):
                rows.append(row)
                each(row)
            bar.advance(task)
            left -= 1
    return Measured(rows, left)


class _StoppedError(BaseException):
    """A stop signal came; no Exception, so that nothing takes it for a failure of what is measured."""


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Within it, a stop signal raises `_StoppedError`, which also kills the process that is waited for."""

    def stop(number: int, frame: object) -> NoReturn:
        del number, frame
        raise _StoppedError

    before = {number: signal.signal(number, stop) for number in exits.heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def table(*columns: str, caption: str = "", numbers: tuple[str, ...] = ()) -> rich.table.Table:
    """A table with these columns and, to the right, those of numbers."""
    made = rich.table.Table(*columns, box=rich.box.SIMPLE_HEAD, caption=caption or None)
    for column in made.columns:
        column.no_wrap = True
    for heading in numbers:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def conclude(
    name: str, measured: Measured, path: pathlib.Path, settings: Settings, console: rich.console.Console
) -> None:
    """Sends the rows to wandb as a table, and prints what the experiment concludes from them, if all are there."""
    from research.runs import tracking

    tracking.send_table(path, settings, name, measured.rows)
    if flags.given() and not measured.left:
        module, _ = experiment.load(flags.target())
        report = getattr(module, "REPORTS", {}).get(name, lambda rows: [])
        for line in report(measured.rows):
            console.print(line, markup=False, soft_wrap=True)


def end(measured: Measured, path: pathlib.Path, console: rich.console.Console, *, all_ok: bool = False) -> int:
    """Prints why rows failed, and where they are; returns the exit code.

    Args:
      measured: the rows.
      path: the folder of the results.
      console: where to print.
      all_ok: whether a failed row is a failure of the whole; otherwise only that no row is good.
    """
    failed = [row for row in measured.rows if row["status"] != "ok"]
    reasons: dict[str, int] = {}
    for row in failed:
        if "needed_bytes" in row:  # which the table has told
            continue
        said = row.get("message", "").strip().splitlines()
        reason = f"{row['status']}: {said[-1][:300]}" if said else row["status"]
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in reasons.items():
        console.print(f"{count} rows: {reason}", style="red", markup=False, soft_wrap=True)
    console.print(f"results: {path / RESULTS}", soft_wrap=True)
    if measured.left:
        console.print(f"stopped, {measured.left} programs are left; the same command goes on with them", soft_wrap=True)
        return exits.INTERRUPTED
    return exits.FAILED if len(failed) == len(measured.rows) or (all_ok and failed) else exits.FINISHED


def sweep_folder() -> str:
    """The name of the folder of the sweep that the command line names."""
    from research.sweeps import sweep

    return sweep.folder_name(flags.target(), flags.overrides())


def print_row(row: Row) -> None:
    """Prints a row as JSON."""
    print(json.dumps(row), flush=True)
