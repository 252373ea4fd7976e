"""Several devices, and several processes, train as one does."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from research.errors import ConfigError
from research.parallel import batch
from research.runs.folder import read_rows, read_starts
from research.settings.config import read
from tests import tiny

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 40

ON_FOUR_DEVICES = """
import numpy as np, pytest
from research.errors import ConfigError
from research.parallel import batch
from research.settings.config import Settings

def mesh(rows, parts=1):
    return batch.mesh(Settings().replace(data={"batch_size": rows}, train={"accumulate": parts}))

assert mesh(8).size == mesh(8, 2).size == 4
with pytest.raises(ConfigError, match=r"config.data.batch_size=6: must be a multiple of the 4 devices$"):
    mesh(6)
with pytest.raises(ConfigError, match=r"=12: must be a multiple of the 4 devices times train.accumulate=2"):
    mesh(12, 2)
mesh = mesh(8)

rows = {"x": np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)}
spread = batch.distribute(rows, mesh)
assert {shard.data.shape for shard in spread["x"].addressable_shards} == {(2, 5)}
np.testing.assert_array_equal(spread["x"], rows["x"])
"""


def start(folder, *flags, **environment):
    """Trains in a process of its own, from the command line."""
    flags = [f"--config={ROOT}/tests/tiny.py", f"--config.run.root={folder.parent}", *flags]
    flags += [
        f"--config.run.id={folder.name}",
        f"--config.train.steps={STEPS}",
        "--config.optimizer.learning_rate=1e-4",
    ]
    return subprocess.Popen(
        [sys.executable, ROOT / "launch" / "train.py", *flags],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def devices(number):
    return {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={number}"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def test_four_devices_share_the_rows():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | devices(4)
    done = subprocess.run([sys.executable, "-c", ON_FOUR_DEVICES], env=environment, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.slow
def test_two_processes_then_two_devices_train_as_one_device(tmp_path):
    """Two processes start; a signal to one stops both after the same step; one process with two devices ends the run.

    Rows and checkpoints are written once. Sums in another order are all that
    differs, at a learning rate that does not amplify it.
    """
    alone = start(tmp_path / "alone")
    assert (alone.communicate()[1], alone.returncode) == ("", 0)

    shared = [f"--config.distributed.coordinator=localhost:{free_port()}", "--config.distributed.num_processes=2"]
    pair = [start(tmp_path / "two", *shared, f"--config.distributed.process_id={i}") for i in range(2)]
    while len(read_rows(tmp_path / "two")) < 5 and all(process.poll() is None for process in pair):
        time.sleep(0.02)
    pair[1].send_signal(signal.SIGTERM)
    told = [process.communicate(timeout=120) for process in pair]
    assert [process.returncode for process in pair] == [75, 75], told
    assert "run folder" in told[0][0]
    assert "run folder" not in told[1][0]
    assert told[0][1] == told[1][1]  # the same step
    done = int(re.search(r"after step (\d+) of", told[0][1])[1])
    assert 5 <= done < STEPS
    assert len(read_rows(tmp_path / "two")) in (done, done - 1)  # stopped in a validation, whose row is still to come

    resumed = start(tmp_path / "two", **devices(2))
    shown, error = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, error
    assert f"resumed after step {done}" in shown
    starts = read_starts(tmp_path / "two")
    assert [(start["processes"], start["devices"], start["resumed_after"]) for start in starts] == [
        (2, 2, 0),
        (1, 2, done),
    ]
    one, two = (read_rows(tmp_path / name) for name in ("alone", "two"))
    assert [row["step"] for row in two] == list(range(1, STEPS + 1))
    for here, there in zip(one, two, strict=True):
        assert here.keys() == there.keys()
        assert here["tokens"] == there["tokens"]
    for name in ("loss", "grad_norm", "val_loss"):
        here, there = ([row[name] for row in rows if name in row] for rows in (one, two))
        np.testing.assert_allclose(there, here, rtol=1e-5)


def test_processes_must_know_their_folder():
    config = tiny.get_config()
    config.distributed.coordinator = "auto"
    with pytest.raises(ConfigError, match=r"config.run.id='': must be given with distributed.coordinator"):
        batch.join(read(config))
