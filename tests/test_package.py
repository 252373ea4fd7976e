"""What `pip install .` gives, started from a folder that has nothing of the sources."""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ROOMS = ("research", "launch", "analysis", "experiments")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package beside its dependencies, which are those of this environment."""
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("installed")
    for room in ROOMS:
        shutil.copytree(ROOT / room, sources / room, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (ROOT / "pyproject.toml", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, sources)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, sources]
    subprocess.run(command, check=True)
    return target


def start(installed, launcher, *arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", f"launch.{launcher}", *arguments],
        cwd=cwd,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_it_declares_what_it_needs(installed):
    (found,) = importlib.metadata.distributions(path=[str(installed)])
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    declared = {name for name in found.requires if "extra ==" not in name}
    assert len(declared) == len([line for line in lines if line.strip() and not line.startswith("#")])
    assert set(found.metadata.get_all("Provides-Extra")) >= {"dev", "notebooks", "tpu"}


@pytest.mark.slow
def test_its_launchers_work_from_any_folder(installed, tmp_path):
    small = [
        "--config.train.steps=2",
        "--config.optimizer.warmup_steps=1",
        "--config.train.eval_batches=1",
        "--config.wandb.mode=disabled",
    ]
    config = "--config=experiments/attention_kinds.py:demo"
    done = start(installed, "train", config, *small, "--config.run.id=a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "a" / "summary.json").exists()
    done = start(installed, "report", "--runs=runs", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<html" in (tmp_path / "runs" / "report.html").read_text()
    assert not [path for path in tmp_path.iterdir() if path.name != "runs"]


@pytest.mark.slow
def test_every_room_of_the_sources_is_in_it(installed):
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.*"):
            relative = path.relative_to(ROOT)
            if path.suffix not in (".py", ".j2", ".jsonl", ".txtpb"):
                continue
            assert (installed / relative).exists() or "notebooks" in relative.parts, relative
