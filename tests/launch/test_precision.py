"""JAX's 64-bit mode would make other numbers of the same config: every launcher refuses it in a line, at once."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from research.errors import ConfigError
from research.settings.config import read
from research.validation import check_precision, validate
from tests import tiny

ROOT = pathlib.Path(__file__).parents[2]
TINY = f"--config={ROOT}/tests/tiny.py"
COMMANDS = (
    ("train.py", TINY),
    ("train.py", TINY, "--dry_run"),
    ("bench.py", f"--config={ROOT}/experiments/cpu_attention.py"),
    ("aot.py", f"--config={ROOT}/experiments/seed_claims.py"),
    ("masks.py", "--visibility=hca"),
    ("sweep.py", TINY),
    ("selection.py", "--lengths=256"),
)


@pytest.mark.parametrize("command", COMMANDS[:1] + COMMANDS[4:5] + COMMANDS[6:], ids=" ".join)
def test_launchers_refuse_64_bits(tmp_path, command):
    check(tmp_path, command)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_launcher_refuses_64_bits(tmp_path, command):
    check(tmp_path, command)


def check(folder, command):
    script, *rest = command
    done = subprocess.run(
        [sys.executable, ROOT / "launch" / script, *rest],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.startswith("invalid config: JAX_ENABLE_X64=1: must be 0, ")
    assert done.stderr.count("\n") == 1
    assert not list(folder.iterdir())


def test_the_mode_set_by_hand_is_refused_too():
    check_precision()
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(ConfigError, match=r"^JAX_ENABLE_X64=1: must be 0"):
            validate(read(tiny.get_config()))
    finally:
        jax.config.update("jax_enable_x64", False)
