"""Whole runs of a tiny model."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import rich.console

from research import errors, tracking
from research.config import ConfigError
from research.model import spec as model_spec
from research.training import checkpoints, optimizer, run
from research.training import step as step_lib
from tests import tiny

TIMES = {"data_seconds", "step_seconds", "tokens_per_second"}
KILLED_AT = 8


def make(root, name, **overrides):
    config = tiny.get_config()
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in overrides.items()})
    config.run.root, config.run.id = str(root), name
    return config


def train(config):
    run.run(config, {}, rich.console.Console(quiet=True))
    return pathlib.Path(config.run.root) / config.run.id


def rows(folder):
    """All that a rerun must repeat to the last bit."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in tracking.read_rows(folder)]


def final_state(config):
    spec = model_spec.from_config(config)
    like = step_lib.init(spec, optimizer.build(config), config.seed)
    saved = checkpoints.Checkpoints(pathlib.Path(config.run.root) / config.run.id / "checkpoints")
    try:
        return saved.restore(saved.latest(), like)
    finally:
        saved.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def unbroken(root):
    config = make(root, "unbroken")
    train(config)
    return config


def folder_of(config):
    return pathlib.Path(config.run.root) / config.run.id


def test_loss_falls(unbroken):
    losses = [row["loss"] for row in rows(folder_of(unbroken))]
    assert losses[-1] < losses[0] - 0.3
    # The first loss is that of a guess among the 257 tokens.
    assert losses[0] == pytest.approx(np.log(257), abs=0.5)


def test_rows_have_every_step_once_and_validation_when_due(unbroken):
    recorded = rows(folder_of(unbroken))
    assert [row["step"] for row in recorded] == list(range(1, 13))
    assert [row["step"] for row in recorded if "val_loss" in row] == [6, 12]
    for row in recorded:
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / np.log(2))
        assert 0 < row["tokens"] <= 2 * 64


def test_folder_tells_what_was_run(unbroken):
    folder = folder_of(unbroken)
    assert json.loads((folder / "config.json").read_text()) == json.loads(unbroken.to_json_best_effort())
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["jax"] == jax.__version__
    assert environment["platform"] == "cpu"
    assert len(environment["corpus"]["digest"]) == 64
    summary = json.loads((folder / "summary.json").read_text())
    last = rows(folder)[-1]
    assert summary["status"] == "ok"
    assert (summary["steps"], summary["final_loss"], summary["val_loss"]) == (12, last["loss"], last["val_loss"])
    assert summary["requested"]["backend"] == summary["effective"]["hca"]["backend"] == "dot_product"
    assert summary["temp_bytes"] > 0
    assert summary["compile_seconds"] > 0


def test_rerun_is_bitwise_equal(root, unbroken):
    again = make(root, "again")
    train(again)
    assert rows(folder_of(again)) == rows(folder_of(unbroken))
    jax.tree.map(np.testing.assert_array_equal, final_state(again), final_state(unbroken))


def test_killed_run_resumes_to_the_same_end(root, unbroken):
    """SIGKILL after step 8, checkpoint at 5: steps 6 to 8 are done again, and each is recorded once."""
    script = f"""
import os, signal, sys
from research import tracking
from tests.training import test_run
log = tracking.Tracker.log
def log_and_die(self, step, row):
    log(self, step, row)
    if step == {KILLED_AT}:
        os.kill(os.getpid(), signal.SIGKILL)
tracking.Tracker.log = log_and_die
test_run.train(test_run.make({str(root)!r}, "killed"))
"""
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False)
    assert done.returncode == -signal.SIGKILL
    config = make(root, "killed")
    folder = folder_of(config)
    assert [row["step"] for row in rows(folder)] == list(range(1, KILLED_AT + 1))
    assert not (folder / "summary.json").exists()

    train(config)
    assert rows(folder) == rows(folder_of(unbroken))
    jax.tree.map(np.testing.assert_array_equal, final_state(config), final_state(unbroken))


def test_recall_is_scored_by_distance(root):
    config = make(root, "recall", data__task="recall", data__pairs=5)
    folder = folder_of(config)
    train(config)
    summary = json.loads((folder / "summary.json").read_text())
    shares = {name: value for name, value in summary.items() if name.startswith("val_accuracy")}
    assert set(shares) == {
        "val_accuracy",
        *(f"val_accuracy_{r}" for r in ("4_to_7", "8_to_15", "16_to_31", "32_to_61")),
    }
    assert all(0 <= share <= 1 for share in shares.values())
    # The first loss is that of a guess among the 257 tokens, and questions alone count.
    assert rows(folder)[0]["loss"] == pytest.approx(np.log(257), abs=0.5)
    assert {row["tokens"] for row in rows(folder)} == {2 * 5}
    assert rows(folder)[-1].items() >= shares.items()


def test_finished_run_is_not_repeated(unbroken):
    written = [folder_of(unbroken) / name for name in ("metrics.jsonl", "summary.json", "environment.json")]
    before = [path.stat().st_mtime_ns for path in written]
    train(unbroken)
    assert [path.stat().st_mtime_ns for path in written] == before


def test_folder_of_another_run_is_refused_and_left_alone(root, unbroken):
    other = make(root, "unbroken", attention__window=8)
    summary = (folder_of(unbroken) / "summary.json").read_text()
    with pytest.raises(ConfigError, match=r"attention\.window: 16 there, 8 here"):
        train(other)
    assert (folder_of(unbroken) / "summary.json").read_text() == summary


def test_nan_loss_names_its_step_and_is_recorded(root, unbroken):
    config = make(root, "diverged", optimizer__learning_rate=1e30, seed=1)
    with pytest.raises(errors.NonFiniteLossError, match=r"loss is (nan|inf) at step 2"):
        train(config)
    summary = json.loads((folder_of(config) / "summary.json").read_text())
    assert summary["status"] == "nan loss"
    assert "at step 2" in summary["message"]
    assert [row["step"] for row in rows(folder_of(config))] == [1]
    # The first loss knows nothing of the learning rate yet: it differs by the seed alone.
    assert rows(folder_of(config))[0]["loss"] != rows(folder_of(unbroken))[0]["loss"]


@pytest.mark.parametrize(("field", "setting"), [("attention__top_k", 0), ("data__path", "/nothing/there")])
def test_invalid_config_is_recorded(root, field, setting):
    config = make(root, f"invalid-{field}", **{field: setting})
    with pytest.raises(ConfigError, match=rf"config\.{field.replace('__', '.')}="):
        train(config)
    assert json.loads((folder_of(config) / "summary.json").read_text())["status"] == "invalid config"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("x"), "invalid config"),
        (NotImplementedError("x"), "unsupported"),
        (errors.NonFiniteLossError("x"), "nan loss"),
        (MemoryError(), "out of memory"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"), "out of memory"),
        (jax.errors.JaxRuntimeError("INTERNAL: x"), "error"),
        (ValueError("x"), "error"),
    ],
)
def test_kinds_of_errors(error, kind):
    assert errors.kind(error) == kind
