"""What is imported is required: by whoever runs, in requirements.txt."""

import ast
import importlib.metadata
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ROOMS = ("research", "launch", "analysis", "experiments")
# Installed by whom it concerns: the peer and what comes with it, and the compiler for TPUs.
APART = {"torch", "transformers", "safetensors", "libtpu"}


def required(name):
    lines = (ROOT / name).read_text().splitlines()
    found = (re.match(r"[\w.-]+", line) for line in lines if not line.startswith("#"))
    return {_normal(match[0]) for match in found if match}


def _normal(name):
    return name.lower().replace("_", "-")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


NOTEBOOKS = "requirements-notebooks.txt"


@pytest.mark.parametrize(
    ("rooms", "files"),
    [
        (ROOMS, ("requirements.txt",)),
        (("analysis/notebooks",), ("requirements.txt", NOTEBOOKS)),
        (("tests",), ("requirements.txt", NOTEBOOKS, "requirements-dev.txt")),
    ],
    ids=["to run", "to read notebooks", "to test"],
)
def test_what_is_imported_is_required(rooms, files):
    packages = importlib.metadata.packages_distributions()
    paths = {path for room in rooms for path in (ROOT / room).rglob("*.py")}
    if rooms == ROOMS:
        paths -= set((ROOT / "analysis" / "notebooks").glob("*.py"))
    modules = {name for path in paths for name in imported(path)}
    others = modules - set(sys.stdlib_module_names) - {*ROOMS, "tests"} - APART
    assert others
    known = set().union(*map(required, files))
    assert {name for name in others if not {*map(_normal, packages[name])} & known} == set()
