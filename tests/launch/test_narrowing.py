"""An override of a field that the sweep sets, through every launcher: it narrows the sweep, or is refused."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import yaml

from launch import line
from research import exits
from research.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[2]
GRID = "--config=tests/points.py:grid"


def start(launcher, *arguments):
    return subprocess.run(
        [sys.executable, f"launch/{launcher}.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},  # experiments below tests/
        capture_output=True,
        text=True,
        check=False,
    )


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_bench_measures_the_points_that_have_the_value(tmp_path):
    """And appends them to the results of the sweep whose points they are; other overrides name a folder."""
    narrow = ["--config.attention.backend=blockwise", "--config.data.seq_len=128"]
    common = ["--config.bench.repeats=1", f"--config.run.root={tmp_path}"]
    done = start("bench", GRID, *narrow, *common)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "bench").iterdir()
    assert folder.name == "points-grid-repeats=1"
    found = rows(folder / "results.jsonl")
    assert [(row["backend"], row["seq_len"], row["status"]) for row in found] == [("blockwise", 128, "ok")] * 3
    assert all(row["overrides"] == {"attention.backend": "blockwise", "data.seq_len": 128} for row in found)


@pytest.mark.slow
def test_masks_shows_the_schedules_of_the_points_that_have_the_value():
    done = start("masks", GRID, "--config.attention.backend=splash", "--json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["seq_len"] for line in done.stdout.splitlines()] == [256]


LENGTHS = "config.data.seq_len=1024: must be 64, 128 or 256, one of the values among the points of tests/points.py:grid"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["bench", "aot", "masks", "sweep"])
def test_value_that_no_point_has_is_refused(launcher, tmp_path):
    done = start(launcher, GRID, "--config.data.seq_len=1024", f"--config.run.root={tmp_path}")
    assert (done.returncode, done.stderr) == (exits.INVALID, f"invalid config: {LENGTHS}\n")
    assert not list(tmp_path.iterdir())


def test_preset_is_held_to_the_same_rule(tmp_path):
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "long.json").write_text('{"data.seq_len": 1024}')
    arguments = (GRID, "--preset=long", f"--config.run.root={tmp_path}")
    for launcher, more in (("bench", ()), ("train", ("--point=backend=blockwise,seq_len=128", "--dry_run"))):
        done = start(launcher, *arguments, *more)
        assert done.returncode == exits.INVALID, done.stderr
        assert done.stderr.startswith("invalid config: config.data.seq_len=1024: must be ")


# Runs launch/masks.py with each of the command lines in its arguments, imported once.
MASKS = """
import os, sys
from launch import flags, masks
for line in sys.argv[1:]:
    if not os.fork():
        sys.argv = ["masks.py", *line.split()]
        flags.run(masks.main, config_required=False, check=masks._check_flags)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_masks_refuses_flags_without_effect():
    """Those that describe a single schedule, beside a sweep; and a preset without one."""
    single = ("visibility=hca", "schedule=static", "seq_len=128", "block=128", "dq_reduction_steps=0")
    lines = [*(f"{GRID} --{flag}" for flag in single), "--preset=x --seq_len=1024"]
    done = subprocess.run(
        [sys.executable, "-c", MASKS, *lines],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},  # experiments below tests/
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [str(exits.INVALID)] * len(lines), done.stderr
    names = [flag.partition("=")[0] for flag in single]
    beside = [f"invalid config: --{name}: has no effect with --config, whose sweep says it" for name in names]
    assert done.stderr.splitlines() == [*beside, "invalid config: --preset: has no effect without --config"]


@pytest.mark.slow
def test_agents_get_the_points_that_have_the_value(tmp_path):
    arguments = (GRID, "--to=wandb", "--config.wandb.mode=offline", f"--config.run.root={tmp_path}")
    done = start("sweep", *arguments, "--config.attention.backend=blockwise")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*/sweep.yaml")
    assert path.parent.name == "points-grid"
    description = yaml.safe_load(path.read_text())
    assert description["name"] == "points-grid-backend=blockwise"
    labels = ["backend=blockwise,seq_len=64", "backend=blockwise,seq_len=128"]
    assert description["parameters"]["point"]["values"] == labels


POINT = "--point=backend=blockwise,seq_len=128"


@pytest.fixture
def root(monkeypatch):
    """Launchers are started in the repository's root."""
    monkeypatch.chdir(ROOT)


def test_point_takes_an_override_that_says_the_same(root):
    for same in ("--config.data.seq_len=128", "--config.train.steps=12"):
        target, *arguments = line.canonical(line.read([GRID, POINT, same]), takes_point=True)
        assert target == GRID
        assert set(arguments) == {same, "--config.attention.backend=blockwise", "--config.data.seq_len=128"}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("data.seq_len=64", "config.data.seq_len=64: must be 128, as the point"),
        ("train.steps=5", "config.train.steps=5: must be 12, as the point"),
        ("train.steps=4", "config.train.steps=4: must be 12, as the point"),
    ],
)
def test_point_refuses_an_override_that_says_otherwise(other, message, root):
    with pytest.raises(ConfigError) as error:
        line.canonical(line.read([GRID, POINT, f"--config.{other}"]), takes_point=True)
    assert str(error.value) == f"{message} backend=blockwise,seq_len=128 of {GRID.removeprefix('--config=')} has it"


def test_train_refuses_in_a_line_what_the_point_says_otherwise():
    done = start("train", GRID, POINT, "--config.data.seq_len=64", "--dry_run")
    assert done.returncode == exits.INVALID
    assert done.stderr.startswith("invalid config: config.data.seq_len=64: must be 128, as the point")
    assert done.stderr.count("\n") == 1
