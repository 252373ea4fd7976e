"""Hyper-connections against loops in NumPy, in float64, written from the formula."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.model import streams as streams_lib
from research.settings.model import Model
from tests.oracles import assert_close

BATCH, SEQ_LEN, COUNT, HIDDEN = 2, 5, 3, 8
SETTINGS = Model(streams=COUNT, hidden=HIDDEN, norm_eps=1e-5, streams_eps=1e-3, sinkhorn_rounds=4)


def balanced(logits, rounds=4, eps=1e-3, last="columns"):
    """One matrix, entry by entry."""
    n = len(logits)
    out = np.array(
        [[np.exp(logits[i][j]) / sum(np.exp(logits[i][m]) for m in range(n)) for j in range(n)] for i in range(n)]
    )
    out += eps
    for number in range(rounds):
        if number:
            out = np.array([[out[i][j] / (sum(out[i]) + eps) for j in range(n)] for i in range(n)])
        out = np.array([[out[i][j] / (sum(out[:, j]) + eps) for j in range(n)] for i in range(n)])
    return out


@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_balancing(rounds):
    logits = 3 * np.random.default_rng(0).standard_normal((7, 4, 4))
    found = streams_lib.sinkhorn(jnp.asarray(logits, jnp.float32), rounds, 1e-3)
    assert_close(found, np.stack([balanced(one, rounds) for one in logits]).astype(np.float32), 1e-5)


def test_columns_sum_to_one_and_rows_the_nearer_the_more_rounds():
    logits = jnp.asarray(5 * np.random.default_rng(0).standard_normal((50, 4, 4)), jnp.float32)
    errors = []
    for rounds in (1, 5, 20):
        found = np.asarray(streams_lib.sinkhorn(logits, rounds, 1e-6))
        assert np.abs(found.sum(axis=1) - 1).max() < (0.01 if rounds == 1 else 1e-5)
        errors.append(np.abs(found.sum(axis=2) - 1).max())
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 1e-4


def test_gradient_of_balancing_is_that_of_all_rounds():
    logits = np.random.default_rng(0).standard_normal((4, 4))
    weights = np.random.default_rng(1).standard_normal((4, 4))

    def loss(logits):
        return (streams_lib.sinkhorn(logits, 3, 1e-3) * jnp.asarray(weights, jnp.float32)).sum()

    found, step = jax.grad(loss)(jnp.asarray(logits, jnp.float32)), 1e-6
    expected = np.zeros((4, 4))
    for at in np.ndindex(4, 4):
        moved = [logits.copy(), logits.copy()]
        moved[0][at] += step
        moved[1][at] -= step
        up, down = ((balanced(one, 3) * weights).sum() for one in moved)
        expected[at] = (up - down) / (2 * step)
    assert_close(found, expected.astype(np.float32), 1e-4)


@functools.cache
def arrays():
    rng = np.random.default_rng(3)
    n = COUNT * (COUNT + 2)
    connection = {
        "gates": rng.standard_normal((COUNT * HIDDEN, n)) / 4,
        "scale": rng.uniform(0.5, 1.5, 3),
        "bias": rng.standard_normal(n),
    }
    collapse = {
        "gates": rng.standard_normal((COUNT * HIDDEN, COUNT)) / 4,
        "scale": rng.uniform(0.5, 1.5, 1),
        "bias": rng.standard_normal(COUNT),
    }
    streams = 2 * rng.standard_normal((BATCH, SEQ_LEN, COUNT, HIDDEN))
    out = rng.standard_normal((BATCH, SEQ_LEN, HIDDEN))
    return connection, collapse, streams, out


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def logits_of(parameters, token):
    """Of one token's streams [N, E]: the product of its gates with the normalised streams."""
    flat = token.reshape(-1)
    return (flat / np.sqrt(np.mean(flat**2) + 1e-5)) @ parameters["gates"]


def connected(parameters, streams, out):
    """Input, next streams and mixing matrix of each token."""
    inputs, mixed = np.zeros(out.shape), np.zeros(streams.shape)
    combs = np.zeros((BATCH, SEQ_LEN, COUNT, COUNT))
    scale, bias = parameters["scale"], parameters["bias"]
    for b, s in np.ndindex(BATCH, SEQ_LEN):
        token = streams[b, s]
        raw = logits_of(parameters, token)
        pre = [sigmoid(scale[0] * raw[i] + bias[i]) + 1e-3 for i in range(COUNT)]
        post = [2 * sigmoid(scale[1] * raw[COUNT + i] + bias[COUNT + i]) for i in range(COUNT)]
        comb = [[scale[2] * raw[k] + bias[k] for k in range(COUNT * (2 + i), COUNT * (3 + i))] for i in range(COUNT)]
        combs[b, s] = balanced(comb)
        inputs[b, s] = sum(pre[i] * token[i] for i in range(COUNT))
        for j in range(COUNT):
            mixed[b, s, j] = post[j] * out[b, s] + sum(combs[b, s, i, j] * token[i] for i in range(COUNT))
    return inputs, mixed, combs


def connect(dtype=jnp.float32):
    connection, _, streams, out = arrays()

    @hk.transform
    def apply(streams, out):
        found = streams_lib.HyperConnection(SETTINGS, "streams")(streams)
        return found.x, found.mix(out), found.comb

    parameters = {"streams": jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), connection)}
    return jax.jit(apply.apply)(parameters, None, jnp.asarray(streams, dtype), jnp.asarray(out, dtype))


def test_connection():
    connection, _, streams, out = arrays()
    for found, expected in zip(connect(), connected(connection, streams, out), strict=True):
        assert_close(found, expected.astype(np.float32), 1e-5)


def test_gates_and_sums_are_float32_for_bfloat16_streams():
    connection, _, streams, out = arrays()
    rounded = (np.asarray(jnp.asarray(array, jnp.bfloat16), np.float64) for array in (streams, out))
    expected = connected(connection, *rounded)
    x, mixed, comb = connect(jnp.bfloat16)
    assert (x.dtype, mixed.dtype, comb.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert_close(comb, expected[2].astype(np.float32), 1e-5)
    for found, exact in ((x, expected[0]), (mixed, expected[1])):  # rounded once, at the end
        assert_close(found.astype(jnp.float32), exact.astype(np.float32), 2**-8)


def test_collapse():
    _, parameters, streams, _ = arrays()

    @hk.transform
    def apply(streams):
        return streams_lib.Collapse(SETTINGS)(streams)

    given = {"collapse": jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), parameters)}
    expected = np.zeros((BATCH, SEQ_LEN, HIDDEN))
    for b, s in np.ndindex(BATCH, SEQ_LEN):
        raw = logits_of(parameters, streams[b, s])
        pre = [sigmoid(parameters["scale"][0] * raw[i] + parameters["bias"][i]) + 1e-3 for i in range(COUNT)]
        expected[b, s] = sum(pre[i] * streams[b, s, i] for i in range(COUNT))
    assert_close(apply.apply(given, None, jnp.asarray(streams, jnp.float32)), expected.astype(np.float32), 1e-5)


def test_starts_near_one_residual_network():
    """Every stream with half its weight to the sublayer, the sublayer's output to all, and an even mix."""
    _, _, streams, out = arrays()
    settings = Model(streams=COUNT, hidden=HIDDEN)

    @hk.transform
    def apply(streams, out):
        found = streams_lib.HyperConnection(settings, "streams")(streams)
        return found.x, found.mix(out)

    streams, out = jnp.asarray(streams, jnp.float32), jnp.asarray(out, jnp.float32)
    x, mixed = apply.apply(apply.init(jax.random.key(0), streams, out), None, streams, out)
    assert_close(x, 0.5 * streams.sum(axis=2), 0.01)
    assert_close(mixed, jnp.broadcast_to((out + streams.mean(axis=2))[:, :, None], streams.shape), 0.01)


def test_measures_leave_padding_out_and_have_no_gradient():
    _, _, streams, _ = arrays()
    streams = jnp.asarray(streams, jnp.float32)
    segments = jnp.asarray(np.where(np.arange(SEQ_LEN) < 3, 0, -1)[None].repeat(BATCH, 0), jnp.int32)
    doubled = streams.at[:, :3].multiply(2.0)
    gain = streams_lib.gain(streams, doubled, segments)
    assert (gain.count, gain.mean()) == (6, pytest.approx(2.0))
    comb = jnp.full((BATCH, SEQ_LEN, 2, 2), 0.5).at[:, 1, 0].set(jnp.array([0.9, 0.35]))
    error = streams_lib.row_error(comb, segments)
    assert (error.count, error.mean()) == (6, pytest.approx(0.25 / 3))
    assert not jax.grad(lambda x: streams_lib.gain(x, 3 * x, segments).mean())(streams).any()
