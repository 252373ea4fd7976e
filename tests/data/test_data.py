import json

import numpy as np
import pytest

from research import data
from research.settings.config import base_config, read


@pytest.fixture
def config(tmp_path):
    for i in range(12):
        (tmp_path / f"{i}.txt").write_bytes(f"text number {i}\n".encode() * (30 * i + 1))
    config = base_config()
    config.data.path = str(tmp_path)
    config.data.validation_fraction = 0.4
    config.data.seq_len = 64
    return config


def assert_same_batches(left, right):
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_validation_is_one_epoch_of_the_held_out_documents(config):
    built = data.build(read(config), 1)
    batches = list(built.validation_batches())
    assert {batch["inputs"].shape for batch in batches} == {(4, 64)}
    targets = np.concatenate([batch["targets"][batch["segments"] >= 0] for batch in batches])
    held_out = np.concatenate([document.text for document in built.corpus.validation])
    np.testing.assert_array_equal(np.sort(targets), np.sort(held_out))
    assert len(batches) > 2
    assert_same_batches(built.validation_batches(2), batches[:2])
    assert_same_batches(built.validation_batches(len(batches) + 5), batches)


def test_the_seed_reorders_training_and_leaves_validation(config):
    first = data.build(read(config), 1)
    config.seed = 1
    second = data.build(read(config), 1)
    assert_same_batches(first.validation_batches(), second.validation_batches())
    assert first.digest == second.digest
    assert (next(first.train_iterator())["inputs"] != next(second.train_iterator())["inputs"]).any()


def test_training_never_shows_a_held_out_document(config):
    built = data.build(read(config), 1)
    training = {document.text[:64].tobytes() for document in built.corpus.training}
    iterator = built.train_iterator()
    starts = set()
    for _ in range(200):
        batch = next(iterator)
        for row, column in np.argwhere((batch["positions"] == 0) & (batch["inputs"] == data.BOS)):
            inside = batch["segments"][row] == batch["segments"][row, column]
            starts.add(batch["targets"][row, inside].astype(np.uint8).tobytes())
    assert starts == training


def test_the_config_reaches_the_packing(config):
    config.data.chunk_len = 16
    config.data.batch_size = 3
    built = data.build(read(config), 8)
    assert built.packing == data.PackingSpec(seq_len=64, batch_size=3, chunk_len=16, alignment=8)
    assert built.packing == data.packing_spec(read(config), 8)
    assert next(built.train_iterator())["positions"].max() == 15


def test_the_record_says_what_was_read(config, tmp_path):
    record = json.loads(json.dumps(data.build(read(config), 1).describe()))
    files = list(tmp_path.iterdir())
    assert record["source"] == config.data.path
    assert record["training_documents"] + record["validation_documents"] == len(files)
    assert record["training_bytes"] + record["validation_bytes"] == sum(file.stat().st_size for file in files)
    assert record["digest"] == data.build(read(config), 1).digest
    assert record["duplicate_documents"] == record["binary_files_left_out"] == 0
    (tmp_path / "copy.txt").write_bytes(files[0].read_bytes())
    (tmp_path / "picture.txt").write_bytes(b"\0")
    record = data.build(read(config), 1).describe()
    assert record["duplicate_documents"] == record["binary_files_left_out"] == 1


def test_the_standard_library_by_default():
    built = data.build(read(base_config()), 128)
    batches = list(built.validation_batches())
    segments = np.concatenate([batch["segments"] for batch in batches])
    assert built.describe()["validation_bytes"] == (segments >= 0).sum()
    assert (segments >= 0).mean() > 0.97  # little padding, although starts are aligned
    starts = np.argwhere((segments >= 0) & (np.concatenate([batch["positions"] for batch in batches]) == 0))
    assert (starts[:, 1] % 128 == 0).all()
    assert len(starts) > len(segments)  # some rows hold more than one chunk
    inputs = np.concatenate([batch["inputs"] for batch in batches])
    assert (inputs == data.BOS).sum() == len(built.corpus.validation)
    assert (inputs < data.VOCAB_SIZE).all()
