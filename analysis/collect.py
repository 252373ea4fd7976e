"""The results of a sweep in one small file: `python analysis/collect.py runs/mask_strategies-demo OUT.jsonl`.

A line per point: its summary, its overrides, what it ran on, and of its metrics what is plotted; no path of this
machine.
"""

import pathlib
import re
import sys

from research.errors import DamagedError
from research.runs import files
from research.runs.folder import CONFIG, METRICS, SUMMARY, last_start, read_rows
from research.sweeps.experiment import Row

UNFINISHED, UNREADABLE = "unfinished", "unreadable"
_FILES = (CONFIG, METRICS, SUMMARY, "log.txt")
_OF_HERE = ("folder", "command", "config", "environment", "metrics")  # replaced by less, or left out
_ENVIRONMENT = ("date", "python", "packages", "platform", "device", "cpus")
_METRICS = ("step", "loss", "step_seconds", "val_loss")
_BLANK = {"config": {}, "environment": {}, "metrics": []}
_FOLDERS = re.compile(r"(?<!\S)/\S*/")  # of an absolute path


def is_run(folder: pathlib.Path) -> bool:
    """Whether a run was started there."""
    return any((folder / name).is_file() for name in _FILES)


def run(folder: pathlib.Path) -> Row:
    """A run as a row: the summary, `overrides`, `layers`, `config`, `environment` and `metrics`.

    One without a summary has the status `UNFINISHED`; one whose files are damaged, `UNREADABLE`.
    """
    row = {"point": folder.name, "folder": str(folder), "overrides": {}, "layers": ["unknown"]}
    try:
        config = files.read_json(folder / CONFIG)
        environment = last_start(folder)
        metrics, summary = read_rows(folder), files.read_json(folder / SUMMARY)
    except (OSError, ValueError, DamagedError) as error:
        return row | _BLANK | {"status": UNREADABLE, "message": f"{type(error).__name__}: {error}"}
    if not summary:
        last = f"the last step on record is {metrics[-1]['step']}" if metrics else "no step on record"
        summary = {"status": UNFINISHED, "message": f"running, or killed: {last}"}
    overrides = summary.get("overrides", {})
    if config:
        row["layers"] = config["model"]["layers"]
    row |= {"config": config, "environment": environment, "metrics": metrics}
    recorded = ("run.", "wandb.")  # where, not what
    return row | summary | {"overrides": {name: x for name, x in overrides.items() if not name.startswith(recorded)}}


def sweep(folder: pathlib.Path) -> list[Row]:
    """The runs in a folder: those that its `results.jsonl` tells of, which knows what each set; then others by date."""
    results = folder / "results.jsonl"
    told = {row["point"]: row for row in files.read_lines(results)}
    rows = {below.name: run(below) for below in sorted(folder.iterdir()) if is_run(below)}
    for name, row in rows.items():
        if name in told:
            row.update({field: told[name][field] for field in ("overrides", "layers")})
    late = sorted(rows.keys() - told.keys(), key=lambda name: (rows[name]["environment"].get("date", "~"), name))
    return [rows[name] if name in rows else told[name] | _BLANK for name in (*told, *late)]


def compact(row: Row) -> Row:
    """What of a row is worth keeping under version control."""
    kept = {name: value for name, value in row.items() if name not in _OF_HERE}
    if "message" in kept:
        kept["message"] = _FOLDERS.sub("", kept["message"])
    kept["environment"] = {name: row["environment"][name] for name in _ENVIRONMENT if name in row["environment"]}
    kept["metrics"] = [{name: entry[name] for name in _METRICS if name in entry} for entry in row["metrics"]]
    return kept


if __name__ == "__main__":
    source, target = map(pathlib.Path, sys.argv[1:])
    files.write_lines(target, [compact(row) for row in sweep(source)])
    print(f"{target}: {target.stat().st_size:,} bytes")
