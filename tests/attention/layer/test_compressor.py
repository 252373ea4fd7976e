import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention.attend import Documents
from research.attention.layer.compressor import Compressor, pool
from research.attention.layer.rope import frequencies, rotate
from research.attention.visibility import CompressedSparse, HeavilyCompressed
from tests.parity.cases import ROPE

HIDDEN, WIDTH, NORM_EPS = 6, 8, 1e-6
FREQS = frequencies(ROPE, 4, compressed=True)


def compressor(ratio: int, overlap: bool) -> hk.Transformed:
    visibility = CompressedSparse(8, ratio, 1) if overlap else HeavilyCompressed(8, ratio)

    def forward(x, positions, segments):
        return Compressor(visibility, WIDTH, NORM_EPS, FREQS)(x, Documents(positions, segments))

    transformed = hk.without_apply_rng(hk.transform(forward))
    return hk.Transformed(jax.jit(transformed.init), jax.jit(transformed.apply))


def grid(seq_len: int, batch: int = 1) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(seq_len, dtype=jnp.int32), (batch, seq_len))


def hidden_states(seq_len: int, batch: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seq_len).standard_normal((batch, seq_len, HIDDEN)), jnp.float32)


def random_parameters(ratio: int, overlap: bool, seed: int = 0) -> hk.Params:
    shapes = jax.eval_shape(compressor(ratio, overlap).init, jax.random.key(0), hidden_states(1), grid(1), grid(1))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), shapes)


def entries_by_loops(parameters, x, positions, segments, ratio: int, overlap: bool) -> np.ndarray:
    """Oracle: one entry, one channel, one token at a time, in float64."""
    w, scale = parameters["compressor"], parameters["compressor/norm"]["scale"]
    values, gates = (np.asarray(x, np.float64) @ np.asarray(w[name], np.float64) for name in ("values", "gates"))
    batch, seq_len, _ = x.shape
    out = np.zeros((batch, seq_len // ratio, WIDTH))
    for b in range(batch):
        for c in range(seq_len // ratio):
            window = range(c * ratio, (c + 1) * ratio)
            pooled = [(t, t % ratio, WIDTH if overlap else 0) for t in window]  # token, row of the bias, series
            both = segments[b, max(c - 1, 0) * ratio : (c + 1) * ratio]
            if overlap and c > 0 and (both == both[0]).all() and both[0] >= 0:
                pooled += [(t - ratio, t % ratio, 0) for t in window]
            for d in range(WIDTH):
                weights = np.array([np.exp(gates[b, t, s + d] + w["position_bias"][r, s + d]) for t, r, s in pooled])
                out[b, c, d] = np.dot(weights, [values[b, t, s + d] for t, _, s in pooled]) / weights.sum()
    out *= np.asarray(scale) / np.sqrt(np.square(out).mean(-1, keepdims=True) + NORM_EPS)
    first = np.stack([positions[:, c * ratio] for c in range(seq_len // ratio)], axis=1)
    return np.asarray(rotate(jnp.asarray(out, jnp.float32), jnp.asarray(first), FREQS))


@pytest.mark.parametrize("overlap", [False, True], ids=["hca", "csa"])
def test_equals_loops(overlap):
    x, parameters = hidden_states(23, batch=3), random_parameters(4, overlap)
    segments = jnp.array(
        [[0] * 23, [0] * 8 + [1] * 15, [3] * 6 + [4] * 3 + [5] * 10 + [-1] * 4],
        jnp.int32,
    )
    positions = grid(23, batch=3) + jnp.array([[0], [5], [100]])
    ours = compressor(4, overlap).apply(parameters, x, positions, segments)
    expected = entries_by_loops(parameters, x, positions, segments, 4, overlap)
    np.testing.assert_allclose(ours, expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("overlap", [False, True], ids=["hca", "csa"])
def test_parameters_do_not_depend_on_the_length(overlap):
    module = compressor(4, overlap)
    trees = [module.init(jax.random.key(0), hidden_states(s), grid(s), jnp.zeros_like(grid(s))) for s in (1, 4, 9)]
    for tree in trees[1:]:
        jax.tree.map(np.testing.assert_array_equal, trees[0], tree)
    series = 2 if overlap else 1
    assert trees[0]["compressor"]["position_bias"].shape == (4, series * WIDTH)
    assert not trees[0]["compressor"]["position_bias"].any()


@pytest.mark.parametrize("overlap", [False, True], ids=["hca", "csa"])
@pytest.mark.parametrize(("seq_len", "entries"), [(1, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_an_unfinished_window_does_not_exist(overlap, seq_len, entries):
    parameters = random_parameters(4, overlap)
    x, segments = hidden_states(8)[:, :seq_len], jnp.zeros((1, seq_len), jnp.int32)
    apply = compressor(4, overlap).apply
    ours = apply(parameters, x, grid(seq_len), segments)
    whole = apply(parameters, hidden_states(8), grid(8), jnp.zeros((1, 8), jnp.int32))
    assert ours.shape == (1, entries, WIDTH)
    np.testing.assert_allclose(ours, whole[:, :entries], atol=1e-6)


def test_an_entry_is_rotated_by_the_position_of_its_first_token():
    """R=4: entry 10 stands at position 40, not at 10."""
    x = jnp.broadcast_to(hidden_states(1), (1, 44, HIDDEN))
    segments = jnp.zeros((1, 44), jnp.int32)
    entries = compressor(4, overlap=False).apply(random_parameters(4, False), x, grid(44), segments)
    at_zero = entries[:, :1]
    np.testing.assert_allclose(entries[:, 10:11], rotate(at_zero, jnp.array([[40]]), FREQS), atol=2e-6)
    assert np.abs(entries[:, 10:11] - rotate(at_zero, jnp.array([[10]]), FREQS)).max() > 0.1


@pytest.mark.parametrize(
    ("segments", "changed", "kept"),
    [
        ([0] * 6 + [1] * 10, slice(0, 6), slice(2, 4)),  # window 1 straddles
        ([0] * 8 + [1] * 8, slice(0, 8), slice(2, 4)),
        ([-1] * 8 + [0] * 8, slice(0, 8), slice(2, 4)),
        ([0] * 16, slice(0, 4), slice(2, 4)),  # one window of overlap, no more
    ],
)
def test_overlap_stays_within_a_document(segments, changed, kept):
    parameters, segments = random_parameters(4, True), jnp.array([segments], jnp.int32)

    def entries(x):
        return compressor(4, overlap=True).apply(parameters, x, grid(16), segments)

    x = hidden_states(16)
    np.testing.assert_array_equal(entries(x)[:, kept], entries(x.at[:, changed].add(100.0))[:, kept])
    assert not jax.grad(lambda x: entries(x)[:, kept].sum())(x)[:, changed].any()


def test_overlap_reaches_the_previous_window():
    parameters, x = random_parameters(4, True), hidden_states(16)
    gradient = jax.grad(
        lambda x: compressor(4, True).apply(parameters, x, grid(16), jnp.zeros((1, 16), jnp.int32))[:, 2].sum()
    )(x)
    assert (np.abs(gradient[0]).max(-1) > 0).tolist() == [False] * 4 + [True] * 8 + [False] * 4


@pytest.mark.parametrize("overlap", [False, True], ids=["hca", "csa"])
def test_straddling_and_padded_windows_are_finite_with_finite_gradients(overlap):
    segments = jnp.array([[0] * 6 + [1] * 3 + [-1] * 7], jnp.int32)
    x = hidden_states(16).at[:, 9:].set(0.0)

    def total(parameters, x):
        return compressor(4, overlap).apply(parameters, x, grid(16), segments).sum()

    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(random_parameters(4, overlap), x)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_pooling_weights_sum_to_one_in_bfloat16():
    gates = 30 + jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 128, 16)), jnp.float32)
    pooled = pool(jnp.ones((1, 2, 128, 16), jnp.bfloat16), gates)
    assert pooled.dtype == jnp.float32
    np.testing.assert_allclose(pooled, 1.0, atol=1e-6)


@pytest.mark.parametrize("overlap", [False, True], ids=["hca", "csa"])
def test_bfloat16_loses_only_the_rounding_of_its_factors(overlap):
    """Everything is representable in bfloat16, gates lie near 30, so only values and entries are rounded."""
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), random_parameters(128, overlap))
    rounded["compressor"]["position_bias"] = rounded["compressor"]["position_bias"] + 30
    x = hidden_states(256).astype(jnp.bfloat16)
    segments = jnp.zeros((1, 256), jnp.int32)
    apply = compressor(128, overlap).apply
    low, high = apply(rounded, x, grid(256), segments), apply(rounded, x.astype(jnp.float32), grid(256), segments)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), high, atol=2**-7 * np.abs(high).max())
