import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention.attend import Documents
from research.attention.indexer import kernel as index_kernel
from research.attention.indexer.module import Indexer, select, selection
from research.attention.indexer.scores import Index, Scoring, index_scores
from research.attention.layer.rope import frequencies
from research.attention.visibility import CompressedSparse
from research.settings.attention import Attention
from tests.attention.sizes import largest_array, temp_bytes
from tests.oracles import assert_close
from tests.parity.cases import ROPE

# Heads one by one, by twos and all at once; entries all at once, or in blocks of which the last is not full.
SCORINGS = [
    Scoring("xla", 1, 0),
    Scoring("xla", 2, 16),
    Scoring("xla", 4, 16),
    Scoring("pallas", 1, 512, interpreted=True),
    Scoring("pallas", 2, 16, interpreted=True),
]


def random_index(batch=2, seq_len=300, entries=75, heads=4, width=4, dtype=jnp.float32) -> Index:
    rng = np.random.default_rng(seq_len)
    shapes = [(batch, seq_len, heads, width), (batch, entries, width), (batch, seq_len, heads)]
    q, keys, weights = (rng.standard_normal(shape) for shape in shapes)
    return Index(jnp.asarray(q, dtype), jnp.asarray(keys, dtype), jnp.asarray(weights, jnp.float32))


def direct_scores(index: Index) -> jax.Array:
    """All heads at once."""
    _, _, heads, width = index.q.shape
    dots = jnp.einsum("bsid,bcd->bsic", index.q, index.keys, precision="highest", preferred_element_type=jnp.float32)
    return jnp.einsum("bsic,bsi->bsc", jax.nn.relu(dots), index.weights, precision="highest") / (heads * width) ** 0.5


@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_equal_loops(dtype, scoring):
    index = random_index(2, 5, 19, dtype=dtype)
    expected = np.zeros((2, 5, 19))
    for b, t, c, i in np.ndindex(2, 5, 19, 4):
        dot = np.dot(np.asarray(index.q[b, t, i], np.float64), np.asarray(index.keys[b, c], np.float64))
        expected[b, t, c] += float(index.weights[b, t, i]) * max(dot, 0) / np.sqrt(4 * 4)
    scores = index_scores(index, scoring)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, expected, atol=1e-6)


@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-7)])
def test_some_heads_and_entries_at_a_time_equal_all_at_once(dtype, rtol, scoring):
    index = random_index(dtype=dtype)
    weights = np.random.default_rng(1).standard_normal((2, 300, 75)).astype(np.float32)

    def value_and_gradients(scores):
        return jax.jit(jax.value_and_grad(lambda index: jnp.sum(scores(index) * weights)))(index)

    ours = functools.partial(index_scores, scoring=scoring)
    (value, gradients), (expected, of_direct) = map(value_and_gradients, (ours, direct_scores))
    assert_close(value, expected, 1e-5)
    jax.tree.map(lambda ours, theirs: assert_close(ours, theirs, rtol), gradients, of_direct)


def test_no_scores_of_single_heads_are_kept():
    """Neither for the values nor for the gradients, where each relu would keep its signs."""

    def gradients(scores):
        return jax.value_and_grad(lambda index: jnp.square(scores(index)).sum())

    index, size = random_index(1, 1024, 256, 32, 8), 4 * 1024 * 256
    ours = functools.partial(index_scores, scoring=Scoring())
    assert temp_bytes(gradients(ours), index) < 6 * size
    assert temp_bytes(gradients(direct_scores), index) > 32 * size
    assert largest_array(gradients(ours), random_index(1, 64, 32, 8, 2)) == 64 * 32


@pytest.mark.parametrize("scoring", [SCORINGS[0], SCORINGS[-1]], ids=str)
@pytest.mark.parametrize("top_k", [1, 12, 75, 80])
def test_selection_by_blocks_equals_selection_at_once(top_k, scoring):
    index, visibility = random_index(), CompressedSparse(window=8, ratio=4, top_k=top_k)
    segments = jnp.array([[0] * 300, [0] * 90 + [1] * 200 + [-1] * 10], jnp.int32)
    scores, visible = index_scores(index, scoring), selection.visible_entries(visibility, segments)
    expected = selection.membership(scores, visible, top_k)
    picked = jax.jit(select, static_argnums=(1, 3))(index, visibility, Documents(segments, segments), scoring)
    np.testing.assert_array_equal(picked, expected)


def test_equal_scores_fall_to_the_lower_entry():
    """No weights, no scores: every entry is as good as the other."""
    index = random_index(1, 40, 10)
    index = index._replace(weights=jnp.zeros_like(index.weights))
    picked = select(index, CompressedSparse(window=8, ratio=4, top_k=3), Documents.whole(1, 40), Scoring())
    for t, row in enumerate(np.asarray(picked[0])):
        assert np.flatnonzero(row).tolist() == list(range(min(3, (t + 1) // 4)))


def test_selecting_keeps_no_scores_of_all_queries():
    """What is left of [S, C] are booleans, a byte each."""
    seq_len, entries = 4096, 1024
    index, documents = random_index(1, seq_len, entries, 4, 8), Documents.whole(1, seq_len)
    visibility = CompressedSparse(window=8, ratio=4, top_k=64)
    assert temp_bytes(lambda index: select(index, visibility, documents, Scoring()), index) < 1.5 * seq_len * entries


def choose(seq_len: int, top_k: int, segments=None, seed: int = 0) -> np.ndarray:
    """A random indexer's choice over random tokens, ratio 4."""
    rng = np.random.default_rng(seed)
    x, low_rank_q = (jnp.asarray(rng.standard_normal((1, seq_len, width)), jnp.float32) for width in (6, 5))
    segments = jnp.zeros((1, seq_len), jnp.int32) if segments is None else jnp.array([segments], jnp.int32)

    def forward():
        documents = Documents(Documents.whole(1, seq_len).positions, segments)
        settings = Attention(index_heads=3, index_head_width=8, rope_width=4)
        index = Indexer(settings, 1e-6, frequencies(ROPE, 4, compressed=True))(x, low_rank_q, documents)
        return select(index, CompressedSparse(window=8, ratio=4, top_k=top_k), documents, Scoring())

    module = hk.without_apply_rng(hk.transform(forward))
    return np.asarray(jax.jit(lambda key: module.apply(module.init(key)))(jax.random.key(seed)))[0]


def test_two_are_picked_as_soon_as_two_are_visible():
    counts = choose(seq_len=64, top_k=2).sum(-1)
    np.testing.assert_array_equal(counts, [min(2, (t + 1) // 4) for t in range(64)])


def test_no_future_entry_is_picked():
    picked = choose(seq_len=32, top_k=8)
    assert np.flatnonzero(picked[9]).tolist() == [0, 1]
    np.testing.assert_array_equal(picked.sum(-1), [min(8, (t + 1) // 4) for t in range(32)])


@pytest.mark.parametrize("seq_len", [1, 3])
def test_shorter_than_a_window(seq_len):
    assert choose(seq_len, top_k=2).shape == (seq_len, 0)


def test_only_entries_of_the_own_document_are_picked():
    segments = [0] * 6 + [1] * 10 + [-1] * 4
    picked = choose(20, top_k=4, segments=segments)
    own = [[] for _ in range(20)]
    own[3:6] = [[0]] * 3  # window 1 straddles
    own[11:16] = [[2]] * 4 + [[2, 3]]
    assert [np.flatnonzero(row).tolist() for row in picked] == own


@pytest.mark.parametrize("sizes", [(3, 16), (2, 10)], ids=str)
def test_kernel_refuses_steps_that_leave_heads_or_entries_out(sizes):
    index = random_index(1, 8, 16)
    with pytest.raises(ValueError, match=r"^(heads_at_once=3: must be a divisor of 4|entries_at_once=10: .* of 16)"):
        index_kernel.scores(*sizes, True, *index)


def test_scoring_says_where_its_kernel_is_interpreted():
    def made(backend, platform):
        return Scoring.make(Attention(index_backend=backend), platform)

    found = {platform: made("pallas", platform).interpreted for platform in ("cpu", "gpu", "tpu")}
    assert found == {"cpu": True, "gpu": True, "tpu": False}
    assert not made("xla", "cpu").interpreted
    assert [made("auto", platform).backend for platform in ("cpu", "tpu")] == ["xla", "pallas"]


@pytest.mark.parametrize(("heads", "at_once"), [(4, 4), (64, 8), (12, 6), (7, 7), (22, 2)])
def test_heads_of_the_kernel_are_a_divisor_where_none_are_asked_for(heads, at_once):
    assert Scoring.make(Attention(index_backend="pallas", index_heads=heads), "tpu").heads_at_once == at_once
    assert Scoring.make(Attention(index_heads=heads), "cpu").heads_at_once == 1
