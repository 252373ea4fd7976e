"""The indexer's loss and measures against loops in float64, and its gradients against finite differences of those."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention.attend import Documents, Keys
from research.attention.indexer import loss as indexer_loss
from research.attention.indexer import selection
from research.attention.indexer.loss import Heads
from research.attention.indexer.scores import Index, Scoring, index_scores
from research.attention.visibility import CompressedSparse
from tests import oracles
from tests.attention.sizes import temp_bytes

VISIBILITY = CompressedSparse(window=6, ratio=4, top_k=3)
SCORING = Scoring()
SEQ_LEN = 150  # two blocks of queries, the second not full
PACKINGS = {
    "one document": [[0] * SEQ_LEN, [5] * SEQ_LEN],
    "packed": [[0] * 42 + [1] * 90 + [-1] * 18, [-1] * 3 + [7] * 60 + [2] * 87],
    "only padding": [[-1] * SEQ_LEN, [-1] * SEQ_LEN],
}


def random_arguments(packing="packed", sinks=True, sparse=True, seq_len=SEQ_LEN, dtype=jnp.float32):
    """Index, heads, segments, and what is attended; the selection is not the indexer's own, which need not be."""
    rng = np.random.default_rng(0)
    entries = VISIBILITY.num_entries(seq_len)

    def draw(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    index = Index(draw(2, seq_len, 3, 4), draw(2, entries, 4), draw(2, seq_len, 3, dtype=jnp.float32))
    heads = Heads(
        draw(2, seq_len, 2, 8) * 2,
        Keys(draw(2, seq_len, 8), draw(2, entries, 8)),
        draw(2, dtype=jnp.float32) if sinks else None,
    )
    segments = jnp.array(PACKINGS[packing], jnp.int32)[:, :seq_len]
    visible = selection.visible_entries(VISIBILITY, segments)
    selected = selection.membership(draw(2, seq_len, entries, dtype=jnp.float32), visible, VISIBILITY.top_k)
    return index, heads, segments, selected if sparse else None


def scores_of(index, b, t) -> np.ndarray:
    """[C], by the definition."""
    dots = np.maximum(index["q"][b, t] @ index["keys"][b].T, 0)
    return index["weights"][b, t] @ dots / np.sqrt(dots.shape[0] * index["q"].shape[-1])


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def teacher_of(heads, b, t, mask):
    """[C], 0 where not seen: each head's softmax over what the row of the mask lets it see, and its sink."""
    seq_len = heads["q"].shape[1]
    seen, keys = np.flatnonzero(mask), np.concatenate([heads["local"][b], heads["compressed"][b]])
    attended = np.zeros(len(keys))
    for h in range(heads["q"].shape[2]):
        logits = keys[seen] @ heads["q"][b, t, h] / np.sqrt(keys.shape[1])
        if heads["sinks"] is not None:
            logits = np.append(logits, heads["sinks"][h])
        attended[seen] += softmax(logits)[: len(seen)]
    return attended[seq_len:] / max(attended[seq_len:].sum(), 1e-300)


def in_float64(named):
    arrays = named._asdict()
    arrays |= arrays.pop("keys")._asdict() if isinstance(named, Heads) else {}
    return {name: None if x is None else np.asarray(x, np.float64) for name, x in arrays.items()}


def expected_kl(index, heads, segments, selected) -> float:
    """Sum over tokens, index and heads being dicts of float64."""
    total, seq_len = 0.0, segments.shape[1]
    for b in range(len(segments)):
        mask = oracles.visible(VISIBILITY, segments[b], None if selected is None else selected[b])
        for t in range(seq_len):
            seen = np.flatnonzero(mask[t, seq_len:])
            if len(seen):
                teacher, student = teacher_of(heads, b, t, mask[t])[seen], softmax(scores_of(index, b, t)[seen])
                total += np.sum(teacher * np.log(teacher / student))
    return total


def kl(index, heads, segments, selected):
    return indexer_loss.loss(index, heads, VISIBILITY, Documents(segments, segments), selected, SCORING)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_loss_equals_loops(packing, sinks, sparse):
    index, heads, segments, selected = random_arguments(packing, sinks, sparse)
    total, count = jax.jit(kl)(index, heads, segments, selected)
    assert total.dtype == jnp.float32
    assert count == np.sum(np.array(PACKINGS[packing]) >= 0)
    expected = expected_kl(in_float64(index), in_float64(heads), np.asarray(segments), selected)
    assert expected > 30 or packing == "only padding"
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    # The value is the same on the way to the gradient.
    again = jax.jit(jax.value_and_grad(lambda index: kl(index, heads, segments, selected).total))(index)[0]
    np.testing.assert_allclose(again, total, rtol=1e-6)


def test_of_more_selected_entries_than_top_k_the_first_count():
    index, heads, segments, selected = random_arguments()
    over = jnp.ones_like(selected)
    expected = expected_kl(in_float64(index), in_float64(heads), np.asarray(segments), over)
    np.testing.assert_allclose(jax.jit(kl)(index, heads, segments, over).total, expected, rtol=1e-5)


@pytest.mark.parametrize("sinks", [(-np.inf, 0.3), (-np.inf, -np.inf), (-3e38, 20.0), (3e38, 0.3)])
def test_sinks_of_any_size_equal_loops(sinks):
    index, heads, segments, selected = random_arguments()
    heads = heads._replace(sinks=jnp.array(sinks, jnp.float32))
    expected = expected_kl(in_float64(index), in_float64(heads), np.asarray(segments), selected)
    run = jax.jit(jax.value_and_grad(lambda index, heads: kl(index, heads, segments, selected).total))
    total, gradient = run(index, heads)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert all(np.isfinite(x).all() for x in gradient)
    if not np.isfinite(heads.sinks).any():
        np.testing.assert_allclose(total, run(index, heads._replace(sinks=None))[0], rtol=1e-6)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_gradient_equals_finite_differences(sparse):
    index, heads, segments, selected = random_arguments(sparse=sparse)
    gradients = jax.jit(jax.grad(lambda index: kl(index, heads, segments, selected).total))(index)
    rng, step, exact = np.random.default_rng(1), 1e-6, in_float64(index)
    for name, gradient in gradients._asdict().items():
        direction = rng.standard_normal(gradient.shape)
        ends = [exact | {name: exact[name] + sign * step * direction} for sign in (1, -1)]
        above, below = (expected_kl(end, in_float64(heads), np.asarray(segments), selected) for end in ends)
        along = np.sum(np.asarray(gradient, np.float64) * direction)
        np.testing.assert_allclose(along, (above - below) / (2 * step), rtol=1e-4)


def direct_kl(index, heads, segments, selected):
    """All queries and heads at once, left to automatic differentiation."""
    seq_len = segments.shape[1]
    keys = jnp.concatenate([*heads.keys], axis=1)
    visible = selection.visible_entries(VISIBILITY, segments)
    seen = visible if selected is None else visible & selected
    t, j = jnp.arange(seq_len)[:, None], jnp.arange(seq_len)[None]
    same = (segments[:, :, None] == segments[:, None]) & (segments >= 0)[:, None]
    mask = jnp.concatenate([VISIBILITY.sees_local(t, j)[None] & same, seen], axis=-1)
    logits = jnp.einsum("bshd,bkd->bhsk", heads.q, keys) / heads.q.shape[-1] ** 0.5
    logits = jnp.where(mask[:, None], logits, -1e30)
    sinks = jnp.broadcast_to(heads.sinks[None, :, None, None], (*logits.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1))[..., seq_len:-1].sum(axis=1)
    teacher = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    student = jax.nn.log_softmax(jnp.where(seen, index_scores(index, SCORING), -1e30))
    return jnp.where(seen, jax.scipy.special.xlogy(teacher, teacher) - teacher * student, 0.0).sum()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_streamed_equals_direct(sparse):
    index, *others = random_arguments(sparse=sparse)
    value, gradients = jax.jit(jax.value_and_grad(lambda index: kl(index, *others).total))(index)
    expected, of_direct = jax.jit(jax.value_and_grad(lambda index: direct_kl(index, *others)))(index)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda ours, theirs: oracles.assert_close(ours, theirs, 1e-5), gradients, of_direct)


def test_a_perfect_student_has_no_loss_and_no_gradient():
    """One head of one index channel that says exactly what the only attention head says."""
    _, heads, segments, _ = random_arguments("one document")
    keys = heads.keys._replace(compressed=jnp.abs(heads.keys.compressed))
    heads = heads._replace(q=jnp.abs(heads.q[:, :, :1, :]), keys=keys, sinks=None)
    index = Index(heads.q, keys.compressed, jnp.ones((2, SEQ_LEN, 1)))
    value, gradients = jax.value_and_grad(lambda index: kl(index, heads, segments, None).total)(index)
    assert abs(value) < 1e-4
    assert max(np.abs(leaf).max() for leaf in gradients) < 1e-5


def test_no_gradient_reaches_the_attention():
    index, heads, segments, selected = random_arguments()
    gradients = jax.grad(lambda heads: kl(index, heads, segments, selected).total)(heads)
    jax.tree.map(lambda gradient: np.testing.assert_array_equal(gradient, 0.0), gradients)


def test_what_sees_nothing_gets_no_gradient():
    index, *others = random_arguments(sparse=False)
    gradients = jax.grad(lambda index: kl(index, *others).total)(index)
    segments = np.array(PACKINGS["packed"])
    visible = np.asarray(selection.visible_entries(VISIBILITY, jnp.asarray(segments)))
    # A single entry has probability 1 whatever its score.
    matters = visible.sum(axis=-1) > 1
    for gradient in (gradients.q, gradients.weights):
        size = np.abs(gradient).reshape(*segments.shape, -1).max(axis=-1)
        assert (size[matters] > 0).all()
        assert (size[segments < 0] == 0).all()
        assert (size[~visible.any(axis=-1)] == 0).all()
    unseen = ~visible.any(axis=1)
    assert unseen.any()
    assert (np.asarray(gradients.keys)[unseen] == 0).all()


def test_a_head_that_attends_to_its_sink_alone_does_not_count():
    """Head 0 gives all it has to its sink, so the teacher is what head 1 attends to."""
    index, heads, segments, _ = random_arguments("one document")
    drowned = heads._replace(sinks=jnp.array([60.0, 0.0]))
    alone = heads._replace(q=heads.q[:, :, 1:], sinks=jnp.zeros(1))
    np.testing.assert_allclose(kl(index, drowned, segments, None).total, kl(index, alone, segments, None).total, 1e-5)
    assert abs(kl(index, heads, segments, None).total - kl(index, alone, segments, None).total) > 1


@pytest.mark.parametrize("seq_len", [1, 3, 4])
def test_hardly_any_entries(seq_len):
    """With one entry there is nothing to choose, with none not even that."""
    index, *others = random_arguments("one document", sparse=False, seq_len=seq_len)
    value, gradients = jax.value_and_grad(lambda index: kl(index, *others).total)(index)
    assert value == 0
    jax.tree.map(lambda gradient: np.testing.assert_array_equal(gradient, 0.0), gradients)
    heads, segments, selected = others
    measured = indexer_loss.measure(index, heads, VISIBILITY, Documents(segments, segments), selected, SCORING)
    assert {name: mean.count for name, mean in measured.items() if name != "kl"} == {
        "recall": 0,
        "coverage": 0,
        "entropy": 0,
        "useful": 0,
    }


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_measures_equal_loops(sparse):
    index, heads, segments, selected = random_arguments(sparse=sparse)
    measured = jax.jit(functools.partial(indexer_loss.measure, visibility=VISIBILITY, scoring=SCORING))(
        index, heads, documents=Documents(segments, segments), selected=selected
    )
    of_index, of_heads = in_float64(index), in_float64(heads)
    rows, top_k = [], VISIBILITY.top_k
    for b in range(2):
        mask = oracles.visible(VISIBILITY, segments[b])
        for t in range(SEQ_LEN):
            seen = np.flatnonzero(mask[t, SEQ_LEN:])
            if len(seen) > top_k:
                scores, teacher = scores_of(of_index, b, t)[seen], teacher_of(of_heads, b, t, mask[t])[seen]
                chosen, best = (set(np.argsort(-x, stable=True)[:top_k]) for x in (scores, teacher))
                student = softmax(scores)
                entropy = -np.sum(student * np.log(student))
                rows.append((len(chosen & best) / top_k, teacher[list(chosen)].sum(), entropy, top_k / len(seen)))
    assert 100 < len(rows) < 2 * SEQ_LEN
    for name, expected in zip(("recall", "coverage", "entropy", "useful"), np.sum(rows, axis=0), strict=True):
        assert measured[name].count == len(rows)
        np.testing.assert_allclose(measured[name].total, expected, rtol=1e-5)
    np.testing.assert_allclose(measured["kl"].total, kl(index, heads, segments, selected).total, rtol=1e-6)


def test_memory_is_that_of_a_block_of_queries():
    """Forward and backward, 16 heads and 8 index heads: in units of one float32 [S, C], of which none exists."""
    seq_len, entries, width = 4096, 1024, 16
    index = Index(jnp.ones((1, seq_len, 8, width)), jnp.ones((1, entries, width)), jnp.ones((1, seq_len, 8)))
    heads = Heads(
        jnp.ones((1, seq_len, 16, width)),
        Keys(jnp.ones((1, seq_len, width)), jnp.ones((1, entries, width))),
        jnp.zeros(16),
    )
    documents = Documents.whole(1, seq_len)
    visibility = CompressedSparse(window=128, ratio=4, top_k=64)

    def loss(index, heads):
        return indexer_loss.loss(index, heads, visibility, documents, None, SCORING).total

    unit = 4 * seq_len * entries
    assert temp_bytes(jax.value_and_grad(loss), index, heads) < 2 * unit
    assert (
        temp_bytes(lambda *x: indexer_loss.measure(*x, visibility, documents, None, SCORING), index, heads) < 2 * unit
    )


def test_bfloat16_is_rounded_only_where_it_comes_in():
    """Teacher, student and loss are float32: equal to that of the same numbers given as float32."""
    index, heads, segments, selected = random_arguments(dtype=jnp.bfloat16)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (index, heads))
    np.testing.assert_allclose(
        kl(index, heads, segments, selected).total, kl(*exact, segments, selected).total, rtol=1e-5
    )
    gradients = jax.grad(lambda index: kl(index, heads, segments, selected).total)(index)
    assert [leaf.dtype for leaf in gradients] == [leaf.dtype for leaf in index]
