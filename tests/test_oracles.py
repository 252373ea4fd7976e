import numpy as np
import pytest

from tests.oracles import assert_close

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([1.0, NAN], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, NAN]),
        ([NAN, 1.0], [1.0, NAN]),
        ([1.0, INF], [1.0, 2.0]),
        ([1.0, INF], [1.0, -INF]),
        ([1.0], [1.0, 1.0]),
        ([[1.0]], [1.0]),
        ([], []),
        ([1.0, 2.1], [1.0, 2.0]),
        ([1e-9], [0.0]),
        (np.float32([1.0]), np.float64([1.0])),
    ],
)
def test_difference_fails(actual, expected):
    with pytest.raises(AssertionError):
        assert_close(np.array(actual), np.array(expected), 1e-2)


def test_share_of_the_largest_entry_passes():
    assert_close(np.array([0.0, 100.0, NAN]), np.array([0.9, 100.0, NAN]), 1e-2)
    assert_close(np.array([1e-9]), np.array([0.0]), 1e-2, atol=1e-8)
