"""The one way in which programs are measured: planned, checked, run each in a process of its own, kept as rows.

    python -m research.measure.pipeline PROGRAM.json      # prints a JSON row per phase

A measure is a module:

    PHASES               the rows that a program makes, in order, by its `what`
    APART, ENVIRONMENT   whether a program needs a process of its own, and variables set in it beside the present ones
    programs(settings, platform)   what there is to measure of a config
    timeout(settings)    seconds for one program
    identify(program)    what every row says, also when nothing came of it; its `versions` name what computes it
    rows(program)        a row per phase, as soon as it is measured or has failed: `phase`, `status`, and the numbers

Rows are kept in a file of JSON lines. A program whose rows stand there, measured by the same versions, is not measured
again.
"""

import datetime
import importlib
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from research.devices import ignore_absent_devices
from research.measure import apart
from research.measure.program import Program
from research.runs import files
from research.settings.config import Settings
from research.settings.fields import Overrides
from research.sweeps import sweep

MEASURES = ("bench", "aot", "masks", "selection", "peers")
Row = dict[str, Any]


class Measure(Protocol):
    """What a measure's module has; see above."""

    PHASES: dict[str, tuple[str, ...]]
    APART: bool
    ENVIRONMENT: dict[str, str]

    def programs(self, settings: Settings, platform: str) -> list[Program]:
        """What there is to measure of a config."""

    def timeout(self, settings: Settings) -> float:
        """Seconds for one program."""

    def identify(self, program: Program) -> Row:
        """What every row says."""

    def rows(self, program: Program) -> Iterator[Row]:
        """A row per phase."""


class Planned(NamedTuple):
    """A program, what its point of a sweep sets, and the seconds that it may take."""

    program: Program
    overrides: Overrides
    timeout: float


def get(name: str) -> Measure:
    """The measure of that name."""
    return importlib.import_module(f"research.measure.{name}")


def plan(name: str, target: str, common: Overrides, platform: str, *, checks_memory: bool = True) -> list[Planned]:
    """The distinct programs of an experiment's sweep; all points are checked before any is run.

    Args:
      name: of the measure.
      target: the experiment and its argument.
      common: overrides, see `research.sweeps.experiment`.
      platform: 'cpu', 'gpu' or 'tpu'.
      checks_memory: as in `attend.Target`.

    Raises:
      ConfigError: a point is invalid; names every such point.
    """
    measure, found = get(name), {}
    for overrides, settings in sweep.point_settings(target, common, platform, checks_memory=checks_memory):
        for program in measure.programs(settings, platform):
            found.setdefault(program, Planned(program, overrides, measure.timeout(settings)))
    return list(found.values())


def key(program: Program) -> str:
    """Names a program, and the versions of what computes it."""
    return program.key(get(program.measure).identify(program)["versions"])


def measured(planned: Iterable[Planned], results: pathlib.Path, stamp: Row) -> Iterator[list[Row]]:
    """The rows of each program, those that stand in `results` or new ones, which are appended as they come.

    Args:
      planned: what to measure.
      results: a file of JSON lines, which need not be there.
      stamp: what new rows say beside, such as the platform; the date is added.
    """
    stored: dict[str, dict[str, Row]] = {}
    files.repair_lines(results)
    for row in files.read_lines(results):
        stored.setdefault(row.get("key", ""), {})[row["phase"]] = row
    stamp = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")} | stamp
    for program, overrides, timeout in planned:
        name = key(program)
        found = stored.get(name, {})
        if set(found) != set(get(program.measure).PHASES[program.what]):
            found = {}
            for row in run(program, timeout):
                found[row["phase"]] = stamp | {"key": name} | row | {"overrides": overrides}
                files.append_line(results, found[row["phase"]])
        yield list(found.values())


def forget(planned: Iterable[Planned], results: pathlib.Path) -> None:
    """Drops the rows of these programs, so that they are measured anew."""
    anew = {key(program) for program, *_ in planned}
    files.write_lines(results, [row for row in files.read_lines(results) if row.get("key") not in anew])


def run(program: Program, timeout: float) -> Iterator[Row]:
    """The rows of a program; phases that a crash or the time-out, in seconds, swallowed are rows that say so."""
    measure = get(program.measure)
    if not measure.APART:
        yield from measure.rows(program)
        return
    found, ending, message = apart.run("research.measure.pipeline", program.to_json(), timeout, measure.ENVIRONMENT)
    yield from found
    known = {row["phase"] for row in found}
    lost = measure.identify(program) | {"status": ending, "message": message}
    yield from (lost | {"phase": phase} for phase in measure.PHASES[program.what] if phase not in known)


if __name__ == "__main__":
    ignore_absent_devices()
    asked = Program.from_json(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    for made in get(asked.measure).rows(asked):
        print(json.dumps(made), flush=True)
