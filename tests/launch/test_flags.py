import os
import pathlib
import subprocess
import sys

import pytest

from launch import flags, train
from research.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[2]
TARGET = f"--config={ROOT}/tests/tiny.py"


def test_good_command_lines_pass():
    flags.check([TARGET, "--config.attention.window=8", "--noconfig.attention.sinks", "-config.seed", "3", "--fresh"])
    flags.check(["--config", f"{ROOT}/tests/tiny.py:", "--config.seed=1"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--config.attention.windw=8", r"config\.attention\.windw: no such field.*attention\.window\b"),
        ("--config.windw=8", "config.windw: no such field"),
        ("-noconfig.attention.sink", r"config\.attention\.sink: no such field.*attention\.sinks\b"),
        ("--config.attention={'window': 8}", r"config\.attention: is a group.*attention\.window"),
    ],
)
def test_bad_names_are_refused(argument, message):
    with pytest.raises(ConfigError, match=message):
        flags.check([TARGET, argument])


def test_bad_targets_are_refused():
    with pytest.raises(ConfigError, match=r"no file 'experiments/nothing\.py'"):
        flags.check(["--config=experiments/nothing.py:demo"])
    with pytest.raises(ConfigError, match="argument 'huge' after the colon: must be one of ''"):
        flags.check([f"{TARGET}:huge"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TARGET, "--config.attention.windw=8"), "invalid config: config.attention.windw: no such field"),
        ((TARGET, "--config.attention.top_k=0"), "invalid config: config.attention.top_k=0: must be"),
        ((TARGET, "window=8"), "invalid config: window=8: unexpected"),
    ],
)
def test_train_fails_in_one_line(tmp_path, arguments, message):
    command = [sys.executable, ROOT / "launch" / "train.py", *arguments, f"--config.run.root={tmp_path}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_default_id_tells_when_what_and_how():
    identity = train.default_id("experiments/mask_strategies.py:demo", {"attention.block_q": 256})
    assert identity[8] == identity[15] == "-"
    assert identity[:15].replace("-", "").isdigit()
    assert identity[15:] == "-mask_strategies-demo-block_q=256"
