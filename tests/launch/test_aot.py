"""The launcher, its compilers replaced: what it keeps, what it compiles again, and presets."""

import json
import subprocess
import sys

import pytest
import rich.console

from launch import aot as launcher
from launch import flags
from research import exits
from research.errors import ConfigError
from research.measure import aot
from research.runs import files
from research.settings.config import base_config


@pytest.fixture
def planned(monkeypatch):
    monkeypatch.setattr(aot, "versions", lambda: {"jax": "1", "libtpu": "2", "tokamax": "3"})
    config = base_config()
    config.model.layers = ("sliding", "hca")
    return [({"n": number}, point, 1.0) for number, point in enumerate(aot.of_config(config))]


def compiled(point, timeout):
    del timeout
    return [aot.identify(point) | {"phase": phase, "status": "ok"} for phase in aot.PHASES[point.what]]


def test_finished_points_are_not_compiled_again(planned, monkeypatch, tmp_path):
    console, results = rich.console.Console(quiet=True), tmp_path / "results.jsonl"
    monkeypatch.setattr(aot, "run", compiled)
    first = launcher._compile(console, planned[:1], results)
    with open(results, "a", encoding="utf-8") as file:
        file.write('{"key": "half a row')  # a kill
    asked = []
    monkeypatch.setattr(aot, "run", lambda point, timeout: asked.append(point) or compiled(point, timeout))
    rows = launcher._compile(console, planned, results)
    assert asked == [planned[1][1]]
    assert rows[:2] == first
    assert [row["overrides"] for row in rows] == [{"n": 0}] * 2 + [{"n": 1}] * 2
    assert files.read_lines(results) == rows


def test_a_point_that_was_cut_short_is_compiled_again(planned, monkeypatch, tmp_path):
    console, results = rich.console.Console(quiet=True), tmp_path / "results.jsonl"
    monkeypatch.setattr(aot, "run", compiled)
    launcher._compile(console, planned[:1], results)
    results.write_text(results.read_text().splitlines(keepends=True)[0])
    asked = []
    monkeypatch.setattr(aot, "run", lambda point, timeout: asked.append(point) or compiled(point, timeout))
    launcher._compile(console, planned[:1], results)
    assert asked == [planned[0][1]]


def test_without_libtpu_it_says_what_to_install(tmp_path):
    blocker = tmp_path / "sitecustomize.py"
    blocker.write_text(
        "import importlib.metadata as m\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name == 'libtpu':\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
    )
    command = (sys.executable, "launch/aot.py", "--config=tests/tiny.py", f"--config.run.root={tmp_path}")
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": f"{tmp_path}:."}, check=False)
    assert done.returncode == exits.INVALID
    assert "libtpu is not installed: pip install -r requirements-tpu.txt" in done.stderr


def test_a_preset_is_saved_and_read_by_name(tmp_path):
    config = base_config()
    config.run.root = str(tmp_path)
    preset = {"attention.block_q": 256, "model.layers": ("hca", "csa")}
    path = flags.save_preset(config, "best", preset)
    assert json.loads(path.read_text()) == {"attention.block_q": 256, "model.layers": ["hca", "csa"]}
    assert flags._preset(config, "best") == preset
    with pytest.raises(ConfigError, match=r"--preset=other: no .*other\.json; there are best"):
        flags._preset(config, "other")


def test_a_search_saves_the_best_that_compiles(tmp_path):
    config = base_config()
    config.run.root = str(tmp_path)
    common = {"what": "op", "visibility": "hca", "backend": "splash", "schedule": "closed_form", "seq_len": 1024}
    rows = [
        common
        | {"phase": "forward_backward", "status": status, "peak_bytes": peak, "roofline_seconds": seconds}
        | {"compile_seconds": 1.0, "overrides": {"attention.block_q": block}}
        for block, status, peak, seconds in ((128, "ok", 2, 2.0), (256, "ok", 2, 1.0), (512, "out of VMEM", 1, 0.5))
    ]
    launcher._conclude(rich.console.Console(quiet=True), config, "best", rows)
    assert flags._preset(config, "best") == {"attention.block_q": 256}
    with pytest.raises(ConfigError, match="no setting of the search compiles"):
        launcher._conclude(rich.console.Console(quiet=True), config, "none", rows[2:])
