"""Which devices a program asks for where libtpu is installed to compile ahead of time."""

import os
import pathlib
import subprocess
import sys

import pytest

from research import devices

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = """
import jax
from research import devices
from research.attention import visibility
before = jax.config.jax_platforms
devices.ignore_absent_tpu()
print(before or "", jax.config.jax_platforms or "", sep=";")
"""


@pytest.mark.skipif(bool(devices._gpus()), reason="this machine has a GPU")
@pytest.mark.parametrize(("chosen", "expected"), [("", ";cpu"), ("cpu,cuda", "cpu,cuda;cpu,cuda")])
def test_a_program_that_asks_keeps_libtpu_from_devices_that_are_not_there(tmp_path, chosen, expected):
    """And importing the package alone changes nothing."""
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX")}
    environment |= {"PYTHONPATH": f"{tmp_path}:{ROOT}"} | ({"JAX_PLATFORMS": chosen} if chosen else {})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == expected


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_a_gpu_that_is_there_is_asked_first(monkeypatch, platform):
    there = {"cuda": "/dev/nvidia0", "rocm": "/dev/kfd"}[platform]
    plugin = {"cuda": "jax_cuda13_plugin", "rocm": "jax_rocm7_plugin"}[platform]
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: [there] if there.startswith(pattern[:8]) else [])
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object() if name == plugin else None)
    assert devices._gpus() == [platform]
