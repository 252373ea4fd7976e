"""A runs folder as one static page: every sweep, run, bench and compilation in it, failures too."""

import base64
import dataclasses
import datetime
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jinja2

from analysis import aot, bench, collect, frame, plot, style, table
from research.errors import ConfigError, DamagedError
from research.runs import files
from research.runs.folder import FINISHED, last_start, read_starts
from research.sweeps.experiment import Row

RESULTS = "results.jsonl"
_TEMPLATE = "report.html.j2"
_HEADLINE = ("val_accuracy", "val_loss", "step_seconds", "compile_seconds", "temp_bytes")


@dataclasses.dataclass
class Line:
    """A line of a table; `bad` where it did not end well."""

    cells: list[str]
    bad: bool = False


@dataclasses.dataclass
class Section:
    """What the page says of a folder: a table, a picture as base64, and what is folded away, by title."""

    title: str
    told: str = ""
    headings: list[str] = dataclasses.field(default_factory=list)
    lines: list[Line] = dataclasses.field(default_factory=list)
    picture: str = ""
    problems: list[str] = dataclasses.field(default_factory=list)
    details: dict[str, str] = dataclasses.field(default_factory=dict)


def page(root: pathlib.Path) -> str:
    """The HTML, which refers to nothing outside itself.

    Raises:
      ConfigError: there is no such folder, or nothing in it was run.
    """
    if not root.is_dir():
        raise ConfigError(f"--runs={root}: no such folder; must be the folder of runs that --config.run.root names")
    found = [_section(folder, *rest) for folder, *rest in _found(root)]
    if not found:
        raise ConfigError(f"--runs={root}: holds no run, no sweep, and no {RESULTS} of a bench or a compilation")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.tests["number_like"] = lambda text: text.replace(",", "").replace(".", "", 1).isdigit()
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return environment.get_template(_TEMPLATE).render(root=root.resolve().name, date=date, sections=found)


def _found(root: pathlib.Path) -> list[tuple[pathlib.Path, str, Callable[[pathlib.Path, str], Section]]]:
    """Folder, title and maker of every section: runs alone, then sweeps, then what was measured without a model."""
    if collect.is_run(root):
        return [(root, root.resolve().name, _run)]
    folders = [root, *sorted(below for pattern in ("*/", "*/*/") for below in root.glob(pattern))]
    runs = [folder for folder in folders if collect.is_run(folder) and not collect.is_run(folder.parent)]
    sweeps = {folder.parent: None for folder in runs if folder.parent != root or (root / RESULTS).exists()}
    alone = [folder for folder in runs if folder.parent not in sweeps]
    measured = [f for f in folders if (f / RESULTS).exists() and f not in sweeps]

    def title(folder: pathlib.Path) -> str:
        return str(folder.relative_to(root)) if folder != root else root.resolve().name

    makers = ((alone, _run), (sweeps, _sweep), (measured, _measured))
    return [(folder, title(folder), maker) for folders, maker in makers for folder in folders]


def _section(folder: pathlib.Path, title: str, maker: Callable[[pathlib.Path, str], Section]) -> Section:
    try:
        return maker(folder, title)
    except (OSError, ValueError, KeyError, DamagedError) as error:  # a file that was damaged must not hide the others
        return Section(title, problems=[f"cannot be read: {type(error).__name__}: {error}"])


def _run(folder: pathlib.Path, title: str) -> Section:
    row = collect.run(folder)
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return Section(
        title,
        told=" ".join(("+".join(row["layers"]), table.in_effect(row), row["status"])),
        headings=["summary", ""],
        lines=[Line([name, f"{x:,}" if isinstance(x, int) else f"{x:,.6g}"]) for name, x in numbers.items()],
        picture=_curves([row], (), title),
        problems=_problems([row]),
        details={
            "set on the command line": _json(row["overrides"]),
            "config": _json(row["config"]),
            "starts": _json(read_starts(folder) if row["environment"] else []),
        },
    )


def _sweep(folder: pathlib.Path, title: str) -> Section:
    rows = collect.sweep(folder)
    headline = tuple(name for name in _HEADLINE if any(name in row for row in rows))
    finished = sum(row["status"] == FINISHED for row in rows)
    return Section(
        title,
        told=f"{len(rows)} points, {finished} finished",
        headings=table.headings(rows),
        lines=[Line(cells, row["status"] != FINISHED) for cells, row in zip(table.cells(rows), rows, strict=True)],
        picture=_curves(rows, headline, title),
        problems=_problems(rows),
        details={
            "config that the points share": _json(_shared([row["config"] for row in rows if row["config"]])),
            "environment of the first": _json(rows[0]["environment"]),
        },
    )


def _measured(folder: pathlib.Path, title: str) -> Section:
    rows = files.read_lines(folder / RESULTS)
    if not rows:
        return Section(title, told="no row is finished")
    compiled = "topology" in rows[0]
    failed = sum(row["status"] != FINISHED for row in rows)
    headings, lines = frame.cells(rows)
    return Section(
        title,
        told=f"{len(rows)} rows, {failed} failed" + ("; rooflines are a model, not a measurement" if compiled else ""),
        headings=headings,
        lines=[Line(cells, row["status"] != FINISHED) for cells, row in zip(lines, rows, strict=True)],
        problems=[_failure(row) for row in rows if row["status"] != FINISHED],
        picture=_base64(style.png(aot.draw if compiled else bench.draw, rows)),
        details={"environment": _json(last_start(folder))},
    )


def _failure(row: dict[str, Any]) -> str:
    what = f"{frame.setting(row)}, {row['seq_len']:,} tokens, {row['phase']}"
    return f"{what}: {row['status']}: {' '.join(row.get('message', '').split())[:300]}"


def _problems(rows: list[Row]) -> list[str]:
    return [
        f"{table.name(row)}: {row['status']}: {row.get('message', '')}" for row in rows if row["status"] != FINISHED
    ]


def _curves(rows: list[Row], headline: tuple[str, ...], title: str) -> str:
    """The plot as base64; empty where nothing was logged."""
    logged = any("loss" in entry for row in rows for entry in row["metrics"])
    return _base64(style.png(plot.draw, rows, headline, title)) if logged or headline else ""


def _base64(png: bytes) -> str:
    return base64.b64encode(png).decode()


def _json(value: Any) -> str:
    return json.dumps(value, indent=2)


def _shared(configs: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields in which all configs agree."""
    first, shared = (configs or [{}])[0], {}
    for name, value in first.items():
        if isinstance(value, dict):
            shared[name] = _shared([config[name] for config in configs if name in config])
        elif all(config.get(name) == value for config in configs):
            shared[name] = value
    return shared
