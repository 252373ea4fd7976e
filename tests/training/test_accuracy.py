import numpy as np

from research.data.packing import NO_TARGET
from research.training import accuracy

ANSWER, OTHER = 5, 6


def test_shares_by_distance():
    distances = np.zeros((2, 64), np.int32)
    distances[0, [10, 20, 40]], distances[1, [12, 30, 40, 50]] = (4, 7, 20), (9, 16, 31, 5)
    targets = np.where(distances > 0, ANSWER, NO_TARGET)
    said = np.full((2, 64), ANSWER)
    said[0, 20] = said[1, 12] = said[1, 30] = OTHER
    means = accuracy.by_distance(np.eye(8, dtype=np.float32)[said], targets, distances)
    assert {name: (mean.total.item(), mean.count.item()) for name, mean in means.items()} == {
        "accuracy": (4, 7),
        "accuracy_4_to_7": (2, 3),
        "accuracy_8_to_15": (0, 1),
        "accuracy_16_to_31": (2, 3),
        "accuracy_32_to_61": (0, 0),
    }


def test_shares_are_found_in_a_row():
    row = {"val_accuracy_16_to_31": 0.5, "val_accuracy": 0.3, "val_accuracy_8_to_15": 1.0, "val_loss": 1.0}
    assert list(accuracy.shares(row).items()) == [((8, 15), 1.0), ((16, 31), 0.5)]
    assert not accuracy.shares({"val_loss": 1.0})
