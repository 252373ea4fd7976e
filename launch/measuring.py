"""What the launchers of measurements share: programs are measured, rows kept and shown."""

import contextlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator

import rich.box
import rich.console
import rich.progress
import rich.table
from absl import app
from absl import flags as absl_flags

from launch import flags
from research import errors, exits
from research.devices import ignore_absent_tpu
from research.errors import ConfigError
from research.measure import pipeline
from research.measure.pipeline import Planned, Row
from research.runs import tracking
from research.runs.folder import environment, record_start
from research.settings.config import Settings
from research.sweeps import experiment, sweep
from research.validation import check_precision

RESULTS = "results.jsonl"


def define_fresh() -> None:
    """Defines `--fresh`."""
    absl_flags.DEFINE_bool("fresh", False, "measure also what stands in the results")


def define_root() -> None:
    """Defines `--runs`, for what is measured without a config, which has `run.root`."""
    absl_flags.DEFINE_string("runs", "runs", "folder of all runs; without --config")


def root() -> str:
    """The folder that `--runs` names."""
    return absl_flags.FLAGS["runs"].value


def define_lengths(*default: str) -> absl_flags.FlagHolder:
    """Defines `--lengths`."""
    holder = absl_flags.DEFINE_list("lengths", list(default), "sequence lengths")
    absl_flags.register_validator(
        "lengths", lambda texts: all(text.isdecimal() and int(text) > 0 for text in texts), "must be positive integers"
    )
    return holder


def console(*, of_rows: bool = False) -> rich.console.Console:
    """Where tables and progress go; to stderr where stdout is for rows."""
    return rich.console.Console(stderr=of_rows, width=None if sys.stdout.isatty() else 160)


def folder(root: str, name: str, below: str) -> pathlib.Path:
    """Makes the folder of a measure's results, and records the start."""
    path = pathlib.Path(root) / name / below
    path.mkdir(parents=True, exist_ok=True)
    record_start(path, environment())
    return path


def measure(
    planned: list[Planned],
    results: pathlib.Path,
    stamp: Row,
    console: rich.console.Console,
    each: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """The rows of all programs, old and new, behind a progress bar; `each` is called with every row as it is there."""
    if absl_flags.FLAGS["fresh"].value:
        pipeline.forget(planned, results)
    rows = []
    with rich.progress.Progress(console=console) as bar:
        task = bar.add_task("", total=len(planned))
        following = pipeline.measured(planned, results, stamp)
        for program, overrides, _ in planned:
            bar.update(task, description=f"{program.what} {experiment.label(overrides)}"[:100])
            for row in next(following):
                rows.append(row)
                each(row)
            bar.advance(task)
    return rows


def table(*columns: str, caption: str = "", numbers: tuple[str, ...] = ()) -> rich.table.Table:
    """A table with these columns and, to the right, those of numbers."""
    made = rich.table.Table(*columns, box=rich.box.SIMPLE_HEAD, caption=caption or None)
    for column in made.columns:
        column.no_wrap = True
    for heading in numbers:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def conclude(name: str, rows: list[Row], path: pathlib.Path, settings: Settings, console: rich.console.Console) -> None:
    """Sends the rows to wandb as a table, prints what the experiment concludes from them, and where they are."""
    tracking.send_table(path, settings, name, rows)
    if flags.given():
        module, _ = experiment.load(flags.target())
        report = getattr(module, "REPORTS", {}).get(name, lambda rows: [])
        for line in report(rows):
            console.print(line, markup=False, soft_wrap=True)
    console.print(f"results: {path / RESULTS}", soft_wrap=True)


def code(rows: list[Row]) -> int:
    """The exit code: whether anything was measured."""
    return exits.FINISHED if any(row["status"] == "ok" for row in rows) else exits.FAILED


def sweep_folder() -> str:
    """The name of the folder of the sweep that the command line names."""
    return sweep.folder_name(flags.target(), flags.overrides())


def print_row(row: Row) -> None:
    """Prints a row as JSON."""
    print(json.dumps(row), flush=True)


def run(main: Callable[[], int]) -> None:
    """As `flags.run`, for launchers without `--config`: foreseen errors are a line."""

    def guarded(argv: list[str]) -> None:
        del argv
        ignore_absent_tpu()
        with _foreseen():
            check_precision()
            sys.exit(main())

    app.run(guarded)


@contextlib.contextmanager
def _foreseen() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        sys.exit(f"{errors.INVALID}: {error}")
