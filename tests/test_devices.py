"""Which devices a program asks for where plugins are installed to compile ahead of time."""

import fnmatch
import glob
import os
import pathlib
import subprocess
import sys
import types

import pytest

from research import devices

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = """
import jax
from research import devices
from research.attention import visibility
before = jax.config.jax_platforms
devices.ignore_absent_devices()
print(before or "", jax.config.jax_platforms or "", sep=";")
"""


@pytest.mark.parametrize("plugin", ["libtpu", "jax_cuda13_plugin", "jax_rocm7_plugin"])
@pytest.mark.parametrize(("chosen", "expected"), [("", ";cpu"), ("cpu,cuda", "cpu,cuda;cpu,cuda")])
def test_a_program_that_asks_keeps_a_plugin_from_devices_that_are_not_there(tmp_path, plugin, chosen, expected):
    """And importing the package alone changes nothing."""
    if any(glob.glob(pattern) for patterns in devices._FILES.values() for pattern in patterns):
        pytest.skip("this machine has an accelerator")
    (tmp_path / plugin).mkdir()
    (tmp_path / plugin / "__init__.py").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX")}
    environment |= {"PYTHONPATH": f"{tmp_path}:{ROOT}"} | ({"JAX_PLATFORMS": chosen} if chosen else {})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    ("there", "plugins", "expected"),
    [
        ("/dev/nvidia0", {"jax_cuda13_plugin"}, []),  # all there: jax chooses
        ("/dev/kfd", {"jax_rocm7_plugin"}, []),
        ("/dev/nvidia0", {"jax_cuda13_plugin", "libtpu"}, ["cuda,cpu"]),
        ("/dev/vfio/1", {"jax_cuda12_plugin", "libtpu"}, ["tpu,cpu"]),
        ("/dev/nvidia0", {"libtpu"}, ["cpu"]),  # but nothing that serves it
        ("/dev/nvidia0", set(), []),
    ],
)
def test_devices_that_are_there_are_asked_first(monkeypatch, there, plugins, expected):
    chosen = []
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: [there] * fnmatch.fnmatch(there, pattern))
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name in plugins or None)
    fake = types.SimpleNamespace(jax_platforms=None, update=lambda name, value: chosen.append(value))
    monkeypatch.setattr(devices.jax, "config", fake)
    devices.ignore_absent_devices()
    assert chosen == expected
