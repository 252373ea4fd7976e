import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def launch(name, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "launch" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


@pytest.mark.slow
def test_prints_a_row_a_point(tmp_path):
    done = launch("selection.py", "--lengths=256", "--top_k=8", f"--runs={tmp_path}")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(row["way"], row["seq_len"], row["status"]) for row in rows] == [
        ("one_hot", 256, "ok"),
        ("threshold", 256, "ok"),
        ("streamed", 256, "ok"),
    ]


@pytest.mark.parametrize(
    ("name", "flag", "message"),
    [
        ("selection.py", "--lengths=4k", "must be positive integers"),
        ("peers.py", "--lengths=0", "must be positive integers"),
        ("peers.py", "--kinds=dense", "must be among sliding, hca, csa"),
    ],
)
def test_bad_input_is_one_error(name, flag, message):
    done = launch(name, flag)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_masks_names_the_flag_that_is_impossible(tmp_path):
    for flag, message in {
        "--block=100": "--block=100: must be 0 (chosen for you) or a positive multiple of 128",
        "--schedule=hybrid": "--schedule=hybrid: must be auto or one of captured, dynamic, static, ",
        "--dq_reduction_steps=2": "--dq_reduction_steps=2: must be 0 (the schedule's own) or 3",
    }.items():
        done = launch("masks.py", flag, "--seq_len=1024", "--visibility=hca", f"--runs={tmp_path}")
        assert done.returncode == 2
        assert done.stderr.startswith(f"invalid config: {message}")
        assert not list(tmp_path.iterdir())
