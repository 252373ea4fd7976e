"""Runs that ended well, whose parameters others take: `ID` or `ID@STEP`, by id below a root, or by path."""

import pathlib
import re
from typing import NamedTuple

from research.errors import ConfigError
from research.runs import checkpoints, files
from research.runs.folder import FINISHED, IMPORTED, SUMMARY


class Source(NamedTuple):
    """A run's folder, a step that it has a checkpoint of, and whether it holds published weights, without moments."""

    folder: pathlib.Path
    step: int
    imported: bool


def find(field: str, root: str, named: str) -> Source:
    """Finds a run and a checkpoint of it, by default the newest.

    Args:
      field: what named it, for errors.
      root: the folder of runs.
      named: the run's id or path, with `@STEP` behind it or not.

    Raises:
      ConfigError: the run has not ended well, or has no such checkpoint.
    """
    name, _, number = named.rpartition("@") if re.search(r"@\d+$", named) else (named, "", "")
    folder = pathlib.Path(root) / name
    summary = files.read_json(folder / SUMMARY)
    status = summary.get("status", "unfinished, or no run")
    if status != FINISHED:
        raise ConfigError(f"{field}: {folder} is {status}; must be a run that ended well, by its id or path")
    found = checkpoints.steps(folder / checkpoints.FOLDER)
    step = int(number) if number else max(found, default=0)
    if step not in found:
        raise ConfigError(f"{field}: {folder} has no checkpoint {step}; must be ID@STEP, a step of {found[::-1]}")
    return Source(folder, step, IMPORTED in summary)
