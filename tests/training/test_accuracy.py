import numpy as np

from research.data.packing import NO_TARGET
from research.training import accuracy


def batch(distances):
    distances = np.array([distances], np.int32)
    padded = np.pad(distances, ((0, 0), (0, 64 - distances.shape[1])))
    return {"targets": np.where(padded > 0, 5, NO_TARGET), "distances": padded}


def test_shares_by_distance():
    batches = [batch([0, 4, 7, 0, 20]), batch([9, 0, 16, 31, 5])]
    hits = iter([[1, 1, 0, 1, 1], [0, 1, 0, 1, 1]])

    def hits_of(_):
        return np.pad(np.array([next(hits)], bool), ((0, 0), (0, 59)), constant_values=True)

    row = accuracy.by_distance(hits_of, batches)
    assert row == {
        "val_accuracy": 4 / 7,
        "val_accuracy_4_to_7": 2 / 3,
        "val_accuracy_8_to_15": 0.0,
        "val_accuracy_16_to_31": 2 / 3,
    }
    assert accuracy.shares(row | {"val_loss": 1.0}) == {(4, 7): 2 / 3, (8, 15): 0.0, (16, 31): 2 / 3}
    assert not accuracy.shares({"val_loss": 1.0})
