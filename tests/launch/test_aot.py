"""The launcher without its compilers, and presets."""

import json
import subprocess
import sys

import pytest
import rich.console

from launch import aot as launcher
from launch import presets
from research import exits
from research.errors import ConfigError
from research.settings.config import Settings


def test_without_libtpu_it_says_what_to_install(tmp_path):
    blocker = tmp_path / "sitecustomize.py"
    blocker.write_text(
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'libtpu' else real(name, *rest)\n"
    )
    command = (sys.executable, "launch/aot.py", "--config=tests/tiny.py", f"--config.run.root={tmp_path}")
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": f"{tmp_path}:."}, check=False)
    assert done.returncode == exits.INVALID
    assert "libtpu is not installed: pip install -r requirements-tpu.txt" in done.stderr


def test_a_preset_is_saved_and_read_by_name(tmp_path):
    preset = {"attention.block_q": 256, "model.layers": ("hca", "csa")}
    path = presets.save(str(tmp_path), "best", preset)
    assert json.loads(path.read_text()) == {"attention.block_q": 256, "model.layers": ["hca", "csa"]}
    assert presets.load(str(tmp_path), "best") == preset
    with pytest.raises(ConfigError, match=r"--preset=other: no .*other\.json; there are best"):
        presets.load(str(tmp_path), "other")


def test_a_search_saves_the_best_that_compiles(tmp_path):
    settings = Settings().replace(run={"root": str(tmp_path)})
    common = {"what": "op", "visibility": "hca", "backend": "splash", "schedule": "closed_form", "seq_len": 1024}
    rows = [
        common
        | {"phase": "forward_backward", "status": status, "peak_bytes": peak, "roofline_seconds": seconds}
        | {"compile_seconds": 1.0, "overrides": {"attention.block_q": block}}
        for block, status, peak, seconds in ((128, "ok", 2, 2.0), (256, "ok", 2, 1.0), (512, "out of VMEM", 1, 0.5))
    ]
    launcher._conclude(rich.console.Console(quiet=True), settings, "best", rows)
    assert presets.load(str(tmp_path), "best") == {"attention.block_q": 256}
    with pytest.raises(ConfigError, match="no setting of the search compiles"):
        launcher._conclude(rich.console.Console(quiet=True), settings, "none", rows[2:])
