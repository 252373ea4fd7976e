import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from research.attention.indexer import Index, Indexer, index_scores, select
from research.attention.rope import frequencies
from research.attention.visibility import CompressedSparse
from tests.parity.cases import NORM_EPS, ROPE


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
    picked = np.asarray(select(scores, visible, top_k))
    np.testing.assert_array_equal(picked, by_sorting(scores, visible, top_k))
    np.testing.assert_array_equal(picked.sum(-1), np.minimum(top_k, visible.sum(-1)))
    if not np.isinf(scores).any():  # lax.top_k cannot tell a hidden entry from a visible -inf
        np.testing.assert_array_equal(picked, by_one_hot(scores, visible, top_k))


def test_membership_without_entries():
    assert membership(jnp.zeros((2, 3, 0)), jnp.zeros((2, 3, 0), bool), 4).shape == (2, 3, 0)


def largest_array(function, *arguments) -> int:
    """Elements of the largest array that the traced function makes, loops and calls included."""

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from sizes(inner)

    return max(sizes(jax.make_jaxpr(function)(*arguments).jaxpr))


def test_no_array_outgrows_queries_times_entries():
    """Neither membership's [S, K, C] nor the scores' [S, C, heads]."""
    seq_len, entries, heads, width = 64, 32, 8, 2
    scores, visible = jnp.zeros((1, seq_len, entries)), jnp.ones((1, seq_len, entries), bool)
    assert largest_array(lambda s, v: membership(s, v, 12), scores, visible) == seq_len * entries
    q, keys, weights = (jnp.zeros(s) for s in [(1, seq_len, heads, width), (1, entries, width), (1, seq_len, heads)])
    assert largest_array(index_scores, q, keys, weights) == seq_len * entries


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_equal_loops(dtype):
    rng = np.random.default_rng(0)
    q, keys = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in [(2, 5, 3, 4), (2, 7, 4)])
    weights = jnp.asarray(rng.standard_normal((2, 5, 3)), jnp.float32)
    expected = np.zeros((2, 5, 7))
    for b, t, c, i in np.ndindex(2, 5, 7, 3):
        dot = np.dot(np.asarray(q[b, t, i], np.float64), np.asarray(keys[b, c], np.float64))
        expected[b, t, c] += float(weights[b, t, i]) * max(dot, 0) / np.sqrt(4 * 3)
    scores = index_scores(q, keys, weights)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, expected, atol=1e-6)


def select(seq_len: int, top_k: int, segments=None, seed: int = 0) -> np.ndarray:
    """A random indexer's choice over random tokens, ratio 4."""
    rng = np.random.default_rng(seed)
    x, low_rank_q = (jnp.asarray(rng.standard_normal((1, seq_len, width)), jnp.float32) for width in (6, 5))
    segments = jnp.zeros((1, seq_len), jnp.int32) if segments is None else jnp.array([segments], jnp.int32)

    def forward():
        visibility = CompressedSparse(window=8, ratio=4, top_k=top_k)
        freqs = frequencies(ROPE, 4, compressed=True)
        positions = jnp.arange(seq_len, dtype=jnp.int32)[None]
        return Indexer(visibility, heads=3, width=8, norm_eps=NORM_EPS, freqs=freqs)(x, low_rank_q, positions, segments)

    module = hk.without_apply_rng(hk.transform(forward))
    return np.asarray(jax.jit(lambda key: module.apply(module.init(key)))(jax.random.key(seed)))[0]


def test_two_are_picked_as_soon_as_two_are_visible():
    counts = select(seq_len=64, top_k=2).sum(-1)
    np.testing.assert_array_equal(counts, [min(2, (t + 1) // 4) for t in range(64)])


def test_no_future_entry_is_picked():
    picked = select(seq_len=32, top_k=8)
    assert np.flatnonzero(picked[9]).tolist() == [0, 1]
    np.testing.assert_array_equal(picked.sum(-1), [min(8, (t + 1) // 4) for t in range(32)])


@pytest.mark.parametrize("seq_len", [1, 3])
def test_shorter_than_a_window(seq_len):
    assert select(seq_len, top_k=2).shape == (seq_len, 0)


def test_only_entries_of_the_own_document_are_picked():
    segments = [0] * 6 + [1] * 10 + [-1] * 4
    picked = select(20, top_k=4, segments=segments)
    own = [[] for _ in range(20)]
    own[3:6] = [[0]] * 3  # window 1 straddles
    own[11:16] = [[2]] * 4 + [[2, 3]]
    assert [np.flatnonzero(row).tolist() for row in picked] == own


def test_visible_entries_by_loops():
    segments = np.array([[0] * 6 + [1] * 10 + [-1] * 5, [2] * 21], np.int32)
    visible = np.asarray(visible_entries(CompressedSparse(window=8, ratio=4, top_k=2), jnp.asarray(segments)))
    for b, t, c in np.ndindex(2, 21, 5):
        window = segments[b, c * 4 : (c + 1) * 4]
        assert visible[b, t, c] == (segments[b, t] >= 0 and (window == segments[b, t]).all() and 4 * c + 3 <= t)
