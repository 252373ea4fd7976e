import json

import numpy as np
import pytest

from research import data
from research.data.packing import NO_TARGET
from research.data.recall import Recall, ranges
from research.errors import ConfigError
from research.settings import fields
from research.settings.config import base_config, read
from research.validation import validate


def make(task="recall", seq_len=64, pairs=6, seed=0):
    return Recall(task, seq_len, 8, pairs, seed)


def rows(task, batches=20):
    iterator = task.train_iterator()
    for _ in range(batches):
        batch = next(iterator)
        for row in range(8):
            yield {name: array[row] for name, array in batch.items()}


@pytest.mark.parametrize("seq_len", [64, 100])
def test_every_key_is_asked_for_once_at_the_distance_that_is_told(seq_len):
    for row in rows(make(seq_len=seq_len)):
        questions = np.flatnonzero(row["targets"] != NO_TARGET)
        assert len(questions) == 6
        np.testing.assert_array_equal(np.flatnonzero(row["distances"]), questions)
        told = set()
        for question in questions:
            value = question - row["distances"][question]
            # The value stands where the distance says, behind its key, and nowhere else does that key stand.
            assert row["inputs"][value] == row["targets"][question]
            assert row["inputs"][value - 1] == row["inputs"][question]
            assert (row["inputs"] == row["inputs"][question]).sum() == 2
            told |= {value - 1, value, question}
        assert len(told) == 18
        blanks = np.delete(row["inputs"], list(told))
        assert len(set(blanks)) == 1
        assert blanks[0] not in row["inputs"][list(told)]


def test_needle_is_asked_for_at_the_end_of_noise():
    for row in rows(make("needle", pairs=0)):
        (question,) = np.flatnonzero(row["targets"] != NO_TARGET)
        assert question == 63
        value = question - row["distances"][question]
        assert row["inputs"][value] == row["targets"][question]
        assert (row["inputs"] == row["inputs"][question]).sum() == 2
        assert len(np.unique(row["inputs"])) > 30


@pytest.mark.parametrize(("task", "pairs"), [("recall", 6), ("needle", 0)])
def test_distances_are_even(task, pairs):
    distances = np.concatenate([row["distances"] for row in rows(make(task, pairs=pairs), 100)])
    asked = distances[distances > 0]
    counts = np.bincount(asked, minlength=62)
    assert not counts[:4].any()
    assert len(counts) == 62
    # The longest fit a little less often, once other pairs hold the row's ends.
    expected = len(asked) / 58
    assert np.abs(counts[4:] - expected).max() < 0.3 * expected + 4 * np.sqrt(expected)


def test_values_and_places_tell_nothing_of_each_other():
    """A model that sees no value must guess: the value at a question is even, whatever the key."""
    pairs = np.array(
        [(row["inputs"][q], row["targets"][q]) for row in rows(make(), 100) for q in np.flatnonzero(row["distances"])]
    )
    table = np.zeros((16, 16))
    np.add.at(table, (pairs[:, 0], pairs[:, 1] - 16), 1)
    expected = len(pairs) / 256
    chi_square = ((table - expected) ** 2 / expected).sum()
    assert chi_square < 255 + 5 * np.sqrt(2 * 255)


def test_ranges_end_with_the_row():
    assert ranges(64) == [(4, 7), (8, 15), (16, 31), (32, 61)]
    assert ranges(7) == [(4, 4)]
    assert ranges(6) == []


def test_batches_are_those_of_a_model():
    batch = next(make().train_iterator())
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == dict.fromkeys(
        ("inputs", "targets", "segments", "positions", "distances"), ((8, 64), np.int32)
    )
    assert not batch["segments"].any()
    np.testing.assert_array_equal(batch["positions"], np.tile(np.arange(64), (8, 1)))


def test_seeds_change_training_and_leave_validation():
    first, second = make(seed=0), make(seed=1)
    assert (next(first.train_iterator())["inputs"] != next(second.train_iterator())["inputs"]).any()
    for a, b in zip(first.validation_batches(3), second.validation_batches(3), strict=True):
        np.testing.assert_array_equal(a["inputs"], b["inputs"])
    assert first.digest == second.digest != make(pairs=5).digest
    validation = {row.tobytes() for batch in first.validation_batches(20) for row in batch["inputs"]}
    assert not validation & {row["inputs"].tobytes() for row in rows(first)}


def test_iterator_goes_on_where_it_was():
    iterator = make().train_iterator()
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    following = [next(iterator) for _ in range(3)]
    again = make().train_iterator()
    again.set_state(state)
    for a, b in zip(following, [next(again) for _ in range(3)], strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_is_built_from_a_config():
    config = base_config()
    fields.override(config, {"data.task": "recall", "data.pairs": 3, "data.seq_len": 40, "seed": 9})
    assert data.build(read(config), 1) == Recall("recall", 40, 4, 3, 9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data.task": "recall"}, r"config\.data\.pairs=0: must be from 1 to 16"),
        ({"data.task": "recall", "data.pairs": 6, "data.seq_len": 32}, r"config\.data\.pairs=6: must be from 1 to 5"),
        ({"data.task": "needle", "data.pairs": 1}, r"config\.data\.pairs=1: must be 0"),
        ({"data.task": "needle", "data.seq_len": 6}, r"config\.data\.seq_len=6: must be 7 or more for a needle"),
        ({"data.task": "needle", "data.batch_size": 0}, r"config\.data\.batch_size=0: must be positive"),
        ({"data.task": "needle", "data.path": "x"}, r"config\.data\.path='x': must be left at 'stdlib'"),
        ({"data.task": "needle", "data.align_starts": False}, r"config\.data\.align_starts=False: must be left"),
    ],
)
def test_settings_that_mean_nothing_are_refused(overrides, message):
    config = base_config()
    fields.override(config, overrides)
    with pytest.raises(ConfigError, match=message):
        validate(read(config), "cpu")
