"""Two processes that fail together: whatever happens to one of them, the other does not wait."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.parallel.test_batch import free_port

SCRIPT = """
import errno, os, pathlib, sys
import jax
folder, port, process = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, process)
from research.errors import ConfigError, DamagedError, InUseError
from research.parallel.agreement import OtherProcessError, exchange, together
from research.runs import checkpoints
from tests.runs.test_checkpoints import newest, state, write


def raised(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fail(error, where):
    def action():
        if process == where:
            raise error
    return raised(lambda: together(action))


assert exchange("ab"[process] * 3000) == ["a" * 2000, "b" * 2000]
assert together(lambda: process) == process
for where in (0, 1):
    there = "" if process == where else f"process {where}: "
    assert fail(ConfigError("config.x=1"), where) == f"ConfigError: {there}config.x=1"
    assert fail(InUseError("it is"), where) == f"InUseError: {there}it is"
    assert fail(KeyError("y"), where) == ("KeyError: 'y'" if process == where else f"OtherProcessError: {there}'y'")

sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("d",)), jax.sharding.PartitionSpec())
make = jax.jit(state, out_shardings=sharding, static_argnums=0)
with checkpoints.Writer(folder, keep_last=2) as writer:
    for step in (1, 2):
        writer.save(step, make(step), {"next": step})
like = make(0)
assert newest(folder, like).step == 2
contents = lambda: {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
before, read = contents(), checkpoints.read


def broken(step_of, error):
    def reading(folder, step, like):
        if process == 1 and step == step_of:
            raise error
        return read(folder, step, like)
    return reading


checkpoints.read = broken(2, OSError(errno.EIO, "Input/output error", "x"))  # one of them alone cannot read
told = raised(lambda: newest(folder, like))
assert told.startswith("OtherProcessError: process 1: " if process == 0 else "OSError: "), told
assert contents() == before
checkpoints.read = broken(2, DamagedError("w is not whole"))  # one of them alone sees it
found = newest(folder, like, ["checkpoint 2 is damaged"])
assert found.step == 1
assert sorted(path.name for path in folder.iterdir()) == ["1", "2.damaged"]
print("agreed", flush=True)
"""


@pytest.mark.slow
def test_what_fails_in_one_process_fails_in_both(tmp_path):
    port, environment = str(free_port()), os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "checkpoints"), port]
    root = pathlib.Path(__file__).parents[2]
    pair = [
        subprocess.Popen(
            [*command, str(process)],
            env=environment,
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        told = [process.communicate(timeout=240) for process in pair]
    except subprocess.TimeoutExpired:
        for process in pair:
            process.kill()
        pytest.fail("one waits for the other")
    assert [shown.splitlines()[-1:] for shown, _ in told] == [["agreed"]] * 2, told
