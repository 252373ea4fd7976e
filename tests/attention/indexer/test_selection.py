import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention.indexer import selection
from research.attention.indexer.selection import membership, visible_entries
from research.attention.visibility import CompressedSparse
from tests.attention.sizes import largest_array, temp_bytes


def by_sorting(scores: np.ndarray, visible: np.ndarray, top_k: int) -> np.ndarray:
    """Oracle: each row's visible entries sorted by falling score, +0 before -0, then by rising index."""
    picked = np.zeros(scores.shape, bool)
    for row in np.ndindex(scores.shape[:-1]):
        order = sorted(np.flatnonzero(visible[row]), key=lambda c: (-scores[row][c], np.signbit(scores[row][c]), c))
        picked[row][order[:top_k]] = True
    return picked


def by_one_hot(scores, visible, top_k: int) -> np.ndarray:
    """Oracle: lax.top_k's own indices."""
    top_k = min(top_k, scores.shape[-1])
    indices = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), top_k)[1]
    return np.asarray(jax.nn.one_hot(indices, scores.shape[-1], dtype=bool).any(-2) & visible)


SCORES = {
    "distinct": lambda rng, shape: rng.standard_normal(shape),
    "few values": lambda rng, shape: rng.integers(-2, 3, shape),
    "signed zeros": lambda rng, shape: rng.choice([-0.0, 0.0], shape),
    "zeros and ones": lambda rng, shape: rng.choice([-1.0, -0.0, 0.0, 1.0], shape),
    "infinities": lambda rng, shape: rng.choice([-np.inf, -3e38, 3e38, np.inf], shape),
    "all equal": lambda rng, shape: np.full(shape, 0.5),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("top_k", [1, 3, 16, 36, 37, 50])
def test_membership_is_what_top_k_picks(scores, top_k, jitted):
    rng = np.random.default_rng(top_k)
    scores = scores(rng, (2, 40, 37)).astype(np.float32)
    visible = rng.random(scores.shape) < np.linspace(0, 1, 40)[:, None]
    select = jax.jit(membership, static_argnums=2) if jitted else membership
    picked = np.asarray(select(jnp.asarray(scores), jnp.asarray(visible), top_k))
    np.testing.assert_array_equal(picked, by_sorting(scores, visible, top_k))
    np.testing.assert_array_equal(picked.sum(-1), np.minimum(top_k, visible.sum(-1)))
    if not np.isinf(scores).any():  # lax.top_k cannot tell a hidden entry from a visible -inf
        np.testing.assert_array_equal(picked, by_one_hot(scores, visible, top_k))


def test_membership_without_entries():
    assert membership(jnp.zeros((2, 3, 0)), jnp.zeros((2, 3, 0), bool), 4).shape == (2, 3, 0)


def test_membership_makes_no_array_of_queries_places_and_entries():
    scores, visible = jnp.zeros((1, 64, 32)), jnp.ones((1, 64, 32), bool)
    assert largest_array(lambda s, v: membership(s, v, 12), scores, visible) == 64 * 32


@pytest.mark.parametrize(("entries", "places"), [(9, 1), (9, 4), (9, 9), (9, 12), (0, 3)])
def test_indices_are_the_selected_entries_in_order(entries, places):
    rng = np.random.default_rng(places)
    scores = jnp.asarray(rng.random((2, 7, entries)), jnp.float32)
    selected = membership(scores, jnp.asarray(rng.random((2, 7, entries)) < 0.7), places)
    found = selection.indices(jnp.asarray(selected), places)
    assert found.dtype == jnp.int32
    assert found.shape == (2, 7, places)
    for row in np.ndindex(2, 7):
        there = np.flatnonzero(selected[row]).tolist()
        assert found[row].tolist() == there + [entries] * (places - len(there))


@pytest.mark.parametrize("entries", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("most", [1, 20, 128, 299])
def test_at_most_keeps_the_first(entries, most):
    selected = np.random.default_rng(most).random((2, 41, entries)) < np.linspace(0, 1, 41)[:, None]
    expected = selected & (np.cumsum(selected, axis=-1) <= most)
    np.testing.assert_array_equal(selection.at_most(jnp.asarray(selected), most), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_capped_counts_what_a_query_sees(packed):
    visibility = CompressedSparse(window=8, ratio=4, top_k=5)
    segments = np.array([[0] * 70 + [1] * 130 + [-1] * 5, [2] * 205], np.int32)
    selected = np.random.default_rng(0).random((2, 205, 51)) < 0.6
    segments = jnp.asarray(segments if packed else np.zeros_like(segments))
    capped = selection.capped(visibility, segments, jnp.asarray(selected))
    seen = np.asarray(visible_entries(visibility, segments))
    expected = selected & seen & (np.cumsum(selected & seen, axis=-1) <= 5)
    assert (expected.sum(axis=-1) == 5).any()
    np.testing.assert_array_equal(capped & seen, expected)
    assert not (capped & ~jnp.asarray(selected)).any()


def test_capped_makes_no_array_of_queries_and_entries_but_booleans():
    visibility, selected = CompressedSparse(window=8, ratio=4, top_k=64), jnp.ones((1, 4096, 1024), bool)
    segments = jnp.zeros((1, 4096), jnp.int32)
    assert temp_bytes(lambda x: selection.capped(visibility, segments, x), selected) < 1.1 * selected.size


@pytest.mark.parametrize("seq_len", [1, 127, 128, 129, 300])
def test_blocks_of_queries_join_to_what_they_were(seq_len):
    tree = {"a": jnp.arange(2 * seq_len * 3).reshape(2, seq_len, 3), "b": jnp.ones((2, seq_len), bool)}
    t, blocks = selection.query_blocks(tree, {"a": -1, "b": False})
    np.testing.assert_array_equal(t.ravel(), np.arange(t.size))
    assert t.size - t.shape[1] < seq_len <= t.size
    for name, whole in tree.items():
        assert blocks[name].shape[:3] == (t.shape[0], 2, t.shape[1])
        np.testing.assert_array_equal(selection.joined(blocks[name], seq_len), whole)
        filling = selection.joined(blocks[name], t.size)[:, seq_len:]
        assert (filling == {"a": -1, "b": False}[name]).all()


def test_visible_entries_by_loops():
    segments = np.array([[0] * 6 + [1] * 10 + [-1] * 5, [2] * 21], np.int32)
    visible = np.asarray(visible_entries(CompressedSparse(window=8, ratio=4, top_k=2), jnp.asarray(segments)))
    for b, t, c in np.ndindex(2, 21, 5):
        window = segments[b, c * 4 : (c + 1) * 4]
        assert visible[b, t, c] == (segments[b, t] >= 0 and (window == segments[b, t]).all() and 4 * c + 3 <= t)
