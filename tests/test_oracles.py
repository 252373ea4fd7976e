import numpy as np
import pytest

from research.attention.visibility import CompressedSparse
from tests.oracles import assert_close, visible

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


def test_of_what_is_selected_the_first_entries_are_seen():
    """Two of ratio 4, in the second document alone; entry 0 is selected, too, and belongs to the first."""
    mask = visible(CompressedSparse(window=1, ratio=4, top_k=2), [0] * 4 + [1] * 16, np.ones((20, 5), bool))
    assert [np.flatnonzero(mask[t, 20:]).tolist() for t in (3, 7, 11, 19)] == [[0], [1], [1, 2], [1, 2]]
    only_later = np.arange(5)[None] >= np.full((20, 1), 2)
    mask = visible(CompressedSparse(window=1, ratio=4, top_k=2), [1] * 20, only_later)
    assert [np.flatnonzero(mask[t, 20:]).tolist() for t in (7, 11, 19)] == [[], [2], [2, 3]]
