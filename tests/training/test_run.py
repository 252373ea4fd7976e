"""Whole runs of a tiny model."""

import json
import os
import pathlib
import socket
import types

import grain
import jax
import numpy as np
import pytest
import rich.console

from research import errors
from research.attention.spec import Spec
from research.errors import ConfigError
from research.model import language_model
from research.runs import checkpoints
from research.runs.folder import read_rows, read_starts
from research.settings.config import read
from research.training import inspection, optimizer, run, steps, trainer
from research.training import step as step_lib
from tests import tiny

TIMES = {"data_seconds", "step_seconds", "elapsed_seconds", "tokens_per_second", "peak_host_bytes"}


def make(root, name, **overrides):
    config = tiny.get_config()
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in overrides.items()})
    config.run.root, config.run.id = str(root), name
    return config


def train(config):
    run.run(read(config), {}, rich.console.Console(quiet=True))
    return pathlib.Path(config.run.root) / config.run.id


def rows(folder):
    """All that a rerun must repeat to the last bit."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in read_rows(folder)]


def final_state(config):
    spec = Spec.make(read(config))
    like = step_lib.init(spec, optimizer.build(spec), config.seed)
    there = folder_of(config) / "checkpoints"
    return checkpoints.read(there, checkpoints.steps(there)[0], like).state


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
    (environment,) = read_starts(folder)
    assert environment["packages"].items() >= {"jax": jax.__version__, "grain": grain.__version__}.items()
    assert (environment["host"], environment["process"]) == (socket.gethostname(), os.getpid())
    assert (environment["overrides"], environment["resumed_after"]) == ({}, 0)
    assert environment["platform"] == "cpu"
    assert len(environment["corpus"]["digest"]) == 64
    summary = json.loads((folder / "summary.json").read_text())
    last = rows(folder)[-1]
    assert summary["status"] == "ok"
    assert (summary["steps"], summary["final_loss"], summary["val_loss"]) == (12, last["loss"], last["val_loss"])
    assert summary["requested"]["backend"] == summary["effective"]["hca"]["backend"] == "dot_product"
    assert summary["temp_bytes"] > 0
    assert summary["compile_seconds"] > 0
    assert summary["eval_temp_bytes"] > 0
    assert summary["eval_compile_seconds"] > 0


def test_rerun_is_bitwise_equal(root, unbroken):
    again = make(root, "again")
    train(again)
    assert rows(folder_of(again)) == rows(folder_of(unbroken))
    jax.tree.map(np.testing.assert_array_equal, final_state(again), final_state(unbroken))


def test_a_seed_makes_one_state_whatever_the_environment_prefers():
    def first():
        config = tiny.get_config()
        return step_lib.init(Spec.make(read(config)), optimizer.build(Spec.make(read(config))), 2**32 - 1).params

    usual = first()
    others = {"jax_default_prng_impl": "rbg", "jax_threefry_partitionable": False}
    before = {name: getattr(jax.config, name) for name in others}
    try:
        for name, other in others.items():
            jax.config.update(name, other)
        again = first()
    finally:
        for name, setting in before.items():
            jax.config.update(name, setting)
    jax.tree.map(np.testing.assert_array_equal, again, usual)


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
    # What is predicted is no byte.
    assert not [name for row in (*rows(folder), summary) for name in row if "bits" in name]
    assert rows(folder)[-1].items() >= shares.items()


def test_finished_run_is_not_repeated(unbroken):
    written = [folder_of(unbroken) / name for name in ("metrics.jsonl", "summary.json", "starts.jsonl")]
    before = [path.stat().st_mtime_ns for path in written]
    train(unbroken)
    assert [path.stat().st_mtime_ns for path in written] == before


def test_folder_of_another_run_is_refused_and_left_alone(root, unbroken):
    other = make(root, "unbroken", attention__window=8)
    summary = (folder_of(unbroken) / "summary.json").read_text()
    with pytest.raises(ConfigError, match=r"attention\.window: 16 there, 8 here"):
        train(other)
    assert (folder_of(unbroken) / "summary.json").read_text() == summary


def check_inspection(config, message, updates):
    """What is kept reproduces the loss, from the updates that made it, and names the files that the batch is from."""
    folder = folder_of(config) / "nonfinite"
    spec = Spec.make(read(config))
    (step,) = checkpoints.steps(folder / "checkpoints")
    kept = checkpoints.read(folder / "checkpoints", step, step_lib.init(spec, optimizer.build(spec), config.seed))
    assert kept.step == updates
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(kept.state))
    batch = dict(np.load(folder / "batch.npz"))
    iterator = trainer.Trainer(read(config)).data.train_iterator()
    iterator.set_state(kept.iterator)
    jax.tree.map(np.testing.assert_array_equal, next(iterator), batch)
    loss = step_lib.losses(language_model.build(spec), kept.state.params, batch)["loss"]
    assert not np.isfinite(loss.total)

    names = json.loads((folder / "documents.json").read_text())
    texts = {document.name: document.text.tobytes() for document in trainer.Trainer(read(config)).data.corpus.training}
    assert 1 <= len(names) < 20
    assert names[0] in message
    for targets, segments in zip(batch["targets"], batch["segments"], strict=True):
        for segment in range(segments.max() + 1):
            piece = bytes(targets[segments == segment].tolist())
            assert any(piece in texts[name] for name in names)


@pytest.mark.parametrize("ahead", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_updates_started_ahead_are_the_same_updates(root, unbroken, ahead):
    config = make(root, f"ahead-{ahead}", train__ahead=ahead)
    train(config)
    assert rows(folder_of(config)) == rows(folder_of(unbroken))
    jax.tree.map(np.testing.assert_array_equal, final_state(config), final_state(unbroken))


def test_no_update_is_started_beyond_one_whose_state_is_needed(root):
    config = make(root, "due", train__ahead=10, train__eval_every=6, train__checkpoint_every=4, train__steps=20)
    until = steps.Steps(pathlib.Path("none"), read(config), types.SimpleNamespace(done=0), None)._start_until
    assert [until(step) for step in (1, 4, 5, 6, 7, 13, 17, 20)] == [4, 4, 6, 6, 8, 16, 18, 20]
    config.profile.steps = 2
    until = steps.Steps(pathlib.Path("none"), read(config), types.SimpleNamespace(done=0), None)._start_until
    assert [until(step) for step in (1, 3, 19)] == [1, 3, 19]


def test_rows_tell_learning_rate_tokens_epoch_time_and_memory(unbroken):
    spec = Spec.make(read(unbroken))
    found, training = read_rows(folder_of(unbroken)), trainer.Trainer(read(unbroken))
    batches, epoch = training.data.train_iterator(), training.data.describe()["training_bytes"]
    seen, schedule = 0, optimizer.learning_rate(spec.settings)
    for step, row in enumerate(found):
        seen += int((next(batches)["segments"] >= 0).sum())
        assert (row["tokens_seen"], row["epoch"]) == (seen, seen / epoch)
        np.testing.assert_allclose(row["learning_rate"], schedule(step), rtol=1e-6)
        assert row["peak_host_bytes"] > 2**20
    elapsed = [row["elapsed_seconds"] for row in found]
    assert elapsed == sorted(elapsed)
    assert elapsed[-1] > sum(row["step_seconds"] for row in found)


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(3, marks=pytest.mark.slow)])
def test_nan_loss_names_its_step_and_is_recorded(root, unbroken, ahead):
    config = make(root, f"diverged-{ahead}", optimizer__learning_rate=1e30, seed=1, train__ahead=ahead)
    with pytest.raises(errors.NonFiniteLossError, match=r"loss is (nan|inf) at step 2; state and batch are in"):
        train(config)
    summary = json.loads((folder_of(config) / "summary.json").read_text())
    assert summary["status"] == "nan loss"
    assert "at step 2" in summary["message"]
    assert [row["step"] for row in rows(folder_of(config))] == [1]
    check_inspection(config, summary["message"], updates=1)
    # The first loss knows nothing of the learning rate yet: it differs by the seed alone.
    assert rows(folder_of(config))[0]["loss"] != rows(folder_of(unbroken))[0]["loss"]


@pytest.fixture(scope="module")
def compiled(root):
    config = make(root, "unseen", model__tied_head=False, seed=2)
    training = trainer.Trainer(read(config))
    training.compile()
    return config, training


@pytest.mark.slow
def test_validation_is_compiled_before_the_first_step(compiled):
    """Out of memory there is known at once, not after the last step."""
    _, training = compiled
    assert isinstance(training._measures, jax.stages.Compiled)
    arguments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(training.state.params))
    assert arguments <= training.cost["eval_argument_bytes"] < arguments * 1.2
    assert {f"eval_{name}" for name in ("lower_seconds", "compile_seconds", "temp_bytes")} <= training.cost.keys()


def test_evaluation_can_be_ended_between_batches(compiled):
    _, training = compiled
    calls = []

    def end():
        calls.append(None)
        if len(calls) == 3:
            raise errors.InterruptedRunError("now")

    with pytest.raises(errors.InterruptedRunError, match=r"^now$"):
        training.evaluate(5, before_batch=end)


def test_nan_in_validation_keeps_the_batch_that_made_it(compiled):
    """A byte that a later validation batch has, and no earlier one, is embedded as NaN."""
    config, training = compiled
    assert np.isfinite(list(training.evaluate(6).values())).all()
    assert training.nonfinite_batch is None
    batches = list(training.data.validation_batches(6))
    seen = [set(batch["inputs"].ravel()) for batch in batches]
    place, byte = next((i, min(new)) for i in range(1, 6) if (new := seen[i].difference(*seen[:i])))
    training.update()
    (name,) = (name for name in training.state.params if "embed" in name)
    training.state.params[name]["embeddings"] = training.state.params[name]["embeddings"].at[byte].set(np.nan)

    row = {f"val_{key}": value for key, value in training.evaluate(6).items()}
    folder = folder_of(config)
    folder.mkdir()
    with pytest.raises(errors.NonFiniteLossError, match=r"^val_loss is nan at step 1; state and validation batch are"):
        steps.require_finite({"loss": 1.0} | row, 1, folder, training)
    kept = dict(np.load(folder / "nonfinite" / "batch.npz"))
    jax.tree.map(np.testing.assert_array_equal, kept, batches[place])
    names = json.loads((folder / "nonfinite" / "documents.json").read_text())
    assert 0 < len(names) < len(training.data.corpus.validation)
    assert set(names) <= {document.name for document in training.data.corpus.validation}
    assert [path.name for path in (folder / "nonfinite" / "checkpoints").iterdir()] == ["1"]


def test_a_measure_that_is_not_finite_is_no_number_to_record(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "keep", lambda *_, validating: f"validating: {validating}")
    row = {"loss": 1.0, "val_loss": 2.0, "val_indexer_kl": float("inf")}
    with pytest.raises(errors.NonFiniteLossError, match=r"^val_indexer_kl is inf at step 4; validating: True$"):
        steps.require_finite(row, 4, tmp_path, None)
    row = {"loss": 1.0, "indexer_kl": float("nan"), "val_loss": 2.0}
    with pytest.raises(errors.NonFiniteLossError, match=r"^indexer_kl is nan at step 4; validating: False$"):
        steps.require_finite(row, 4, tmp_path, None)


@pytest.mark.parametrize(("field", "setting"), [("attention__schedule", "none"), ("data__path", "/nothing/there")])
def test_refused_config_leaves_nothing(tmp_path, root, unbroken, field, setting):
    """No folder, so that the id is free; and of a run that is there nothing less or more."""
    config = make(tmp_path / "new" / "runs", "refused", **{field: setting})
    with pytest.raises(ConfigError, match=rf"config\.{field.replace('__', '.')}="):
        train(config)
    assert list(tmp_path.iterdir()) == []
    before = {path: path.stat() for path in sorted(folder_of(unbroken).rglob("*"))}
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        train(make(root, "unbroken", **{field: setting}))
    assert {path: path.stat() for path in sorted(folder_of(unbroken).rglob("*"))}.keys() == before.keys()
