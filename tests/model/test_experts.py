"""Every way to compute experts against loops in NumPy and the gradients of a formula without any sorting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.errors import SettingError
from research.model import experts as experts_lib
from research.model.experts import Effective, Matrices
from research.model.router import Routing
from research.settings.model import Experts
from tests.attention.sizes import largest_array
from tests.oracles import assert_close

EXPERTS, CHOSEN, HIDDEN, WIDTH = 5, 2, 8, 12
LIMIT = 1.0
WAYS = [Effective("dense", 0), Effective("ragged", 0), Effective("blocks", 4), Effective("blocks", 16)]


def matrices(seed=0) -> Matrices:
    rng = np.random.default_rng(seed)
    shapes = (EXPERTS, HIDDEN, WIDTH), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    return Matrices(*(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes))


def routing(ids) -> Routing:
    ids = np.asarray(ids, np.int32)
    weights = np.random.default_rng(1).uniform(0.1, 1.0, ids.shape)
    return Routing(jnp.asarray(ids), jnp.asarray(np.where(ids < EXPERTS, weights, 0), jnp.float32))


def drawn(tokens, among=EXPERTS):
    rng = np.random.default_rng(tokens)
    return np.stack([rng.permutation(among)[:CHOSEN] for _ in range(tokens)])


def padded(tokens):
    ids = drawn(tokens)
    ids[[0, 3, -1]] = EXPERTS
    return ids


ROUTINGS = {
    "any": drawn(37),
    "block after block full": np.tile([[0, 1], [2, 3]], (16, 1)),
    "experts without tokens": drawn(30, among=2),
    "all tokens to the last": np.tile([[EXPERTS - 1, 0]], (21, 1)),
    "padding": padded(26),
    "nothing but padding": np.full((9, CHOSEN), EXPERTS),
    "one token": drawn(1),
}


def oracle(x, chosen, weights, own, limit=LIMIT) -> np.ndarray:
    """Loops over tokens and their experts, in float64; rounded at the end."""
    out = np.zeros(x.shape)
    gates, ups, downs = (np.asarray(matrix, np.float64) for matrix in own)
    for t, k in np.ndindex(*chosen.shape):
        if (e := chosen[t, k]) < EXPERTS:
            gate, up = x[t] @ gates[e], x[t] @ ups[e]
            if limit:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            out[t] += float(weights[t, k]) * ((gate / (1 + np.exp(-gate)) * up) @ downs[e])
    return out.astype(np.float32)


def formula(x, weights, own, ids, limit=LIMIT):
    """All experts of all tokens at once."""
    gate, up = (jnp.einsum("te,xei->txi", x, matrix, precision="highest") for matrix in own[:2])
    gate, up = jnp.where(gate > limit, limit, gate), jnp.where(jnp.abs(up) > limit, jnp.sign(up) * limit, up)
    share = (jax.nn.one_hot(ids, EXPERTS) * weights[..., None]).sum(axis=1)
    return jnp.einsum("tx,txi,xie->te", share, jax.nn.silu(gate) * up, own[2], precision="highest")


def inputs(ids):
    rng = np.random.default_rng(2)
    x, d_out = (jnp.asarray(rng.standard_normal((len(ids), HIDDEN)), jnp.float32) for _ in range(2))
    return x, d_out


@functools.partial(jax.jit, static_argnums=(0, 1))
def differentiated(way, limit, x, given, own, d_out):
    def run(x, weights, own):
        return way(x, Routing(given.ids, weights), own, limit)

    out, pull_back = jax.vjp(run, x, given.weights, own)
    return out, pull_back(d_out)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_outputs_and_gradients(way, ids):
    (x, d_out), given, own = inputs(ids), routing(ids), matrices()
    out, gradients = differentiated(way, LIMIT, x, given, own, d_out)
    assert out.dtype == jnp.float32
    assert_close(out, oracle(np.asarray(x, np.float64), ids, given.weights, own), 1e-5)
    expected = jax.vjp(functools.partial(formula, ids=given.ids), x, given.weights, own)[1](d_out)
    real = ids < EXPERTS  # the weight of padding has no gradient; its formula has none either
    np.testing.assert_array_equal(np.asarray(gradients[1])[~real], 0)
    jax.tree.map(lambda actual, expected: assert_close(actual, expected, 1e-5), gradients, expected)


def test_clamps_decide_something():
    """Or the tests above would say nothing of them."""
    ids = ROUTINGS["any"]
    (x, _), given, own = inputs(ids), routing(ids), matrices()
    numbers = np.asarray(x, np.float64)
    with_limit, without = (oracle(numbers, ids, given.weights, own, limit) for limit in (LIMIT, 0.0))
    assert np.abs(with_limit - without).max() > 0.1
    for way in WAYS:
        assert_close(way(x, given, own, 0.0), without, 1e-5)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_bfloat16_rounds_but_keeps_sums_and_gradients_of_matrices_in_float32(way):
    ids = ROUTINGS["any"]
    (x, d_out), given, own = inputs(ids), routing(ids), matrices()
    x = x.astype(jnp.bfloat16)
    out, (d_x, d_weights, d_own) = differentiated(way, LIMIT, x, given, own, d_out)
    assert (out.dtype, d_x.dtype, d_weights.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert {leaf.dtype for leaf in d_own} == {jnp.dtype("float32")}
    assert_close(out, oracle(np.asarray(x, np.float64), ids, given.weights, own), 0.03)


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_no_way_but_the_dense_one_asks_every_expert_about_every_token(way):
    """Of XLA's `ragged_dot` only the call is seen here: on a CPU it is no better."""
    ids, own = drawn(64), matrices()

    def run(x, weights, own):
        return way(x, Routing(jnp.asarray(ids, jnp.int32), weights), own, LIMIT).sum()

    x, weights = jnp.zeros((64, HIDDEN)), jnp.zeros((64, CHOSEN))
    rows = 64 * CHOSEN + (EXPERTS * (way.block_rows - 1) if way.block_rows else 0)
    assert largest_array(jax.grad(run, (0, 1, 2)), x, weights, own) <= rows * WIDTH


@pytest.mark.parametrize(
    ("settings", "platform", "expected"),
    [
        ({}, "cpu", ("blocks", 128)),
        ({}, "gpu", ("blocks", 128)),
        ({}, "tpu", ("ragged", 0)),
        ({"count": 64, "per_token": 1}, "cpu", ("blocks", 16)),
        ({"count": 4096, "per_token": 1}, "cpu", ("blocks", 8)),
        ({"block_rows": 24}, "cpu", ("blocks", 24)),
        ({"backend": "dense"}, "tpu", ("dense", 0)),
        ({"backend": "ragged"}, "cpu", ("ragged", 0)),
    ],
)
def test_resolves_to(settings, platform, expected):
    assert experts_lib.resolve(Experts(**{"count": 8, **settings}), 4096, platform) == expected


def test_rows_of_blocks_are_refused_where_the_platform_has_none():
    with pytest.raises(SettingError, match=r"experts\.block_rows=8: must be left at 0 with experts.backend=ragged"):
        experts_lib.resolve(Experts(count=8, block_rows=8), 4096, "tpu")


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_one_token_gets_does_not_depend_on_the_others(way):
    """No limit to an expert's tokens: all of them may go where a token goes."""
    ids, alone = drawn(33), 7
    (x, _), given, own = inputs(ids), routing(ids), matrices()
    crowd = np.tile(ids[alone], (33, 1))
    there = way(x, Routing(jnp.asarray(crowd), given.weights), own, LIMIT)
    assert_close(there[alone], way(x, given, own, LIMIT)[alone], 1e-6)
