"""Routing and what keeps it even, against loops in NumPy."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.model import router as router_lib
from research.settings.model import Experts
from research.training import balance
from tests.oracles import assert_close

EXPERTS, CHOSEN, HIDDEN, TOKENS, VOCABULARY = 6, 2, 8, 20, 11
SETTINGS = Experts(count=EXPERTS, per_token=CHOSEN, scale=2.5)


def given(*, by_table: bool):
    rng = np.random.default_rng(0)
    parameters = {"scores": rng.standard_normal((HIDDEN, EXPERTS)).astype(np.float32)}
    if by_table:
        parameters["table"] = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(VOCABULARY)]).astype(np.int32)
    else:
        parameters["balance"] = (2 * rng.standard_normal(EXPERTS)).astype(np.float32)
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    tokens = rng.integers(0, VOCABULARY, TOKENS).astype(np.int32)
    return parameters, x, tokens


def route(parameters, x, tokens, real=None):
    @hk.transform
    def apply(*arguments):
        return router_lib.Router(SETTINGS, VOCABULARY, by_table="table" in parameters)(*arguments)

    real = np.ones(len(x), bool) if real is None else real
    return apply.apply({"router": jax.tree.map(jnp.asarray, parameters)}, None, *map(jnp.asarray, (x, tokens, real)))


def expected(parameters, x, tokens):
    """Experts of each token in the order of their numbers, and their weights."""
    ids, weights = [], []
    for hidden, token in zip(x.astype(np.float64), tokens, strict=True):
        scores = np.sqrt(np.log1p(np.exp(hidden @ parameters["scores"])))
        if "table" in parameters:
            own = sorted(parameters["table"][token])
        else:
            own = sorted(sorted(range(EXPERTS), key=lambda e: -(scores[e] + parameters["balance"][e]))[:CHOSEN])
        ids.append(own)
        weights.append([2.5 * scores[e] / sum(scores[own]) for e in own])
    return np.array(ids), np.array(weights)


@pytest.mark.parametrize("by_table", [False, True])
def test_experts_and_weights(by_table):
    routing, _ = route(*given(by_table=by_table))
    order = np.argsort(routing.ids, axis=1)
    ids, weights = expected(*given(by_table=by_table))
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(routing.ids), order, 1), ids)
    assert_close(np.take_along_axis(np.asarray(routing.weights), order, 1), weights.astype(np.float32), 1e-5)


def test_balance_chooses_and_does_not_weigh():
    parameters, x, tokens = given(by_table=False)
    parameters["balance"][:] = 0
    plain, _ = route(parameters, x, tokens)
    parameters["balance"][4] = 100.0
    routing, scores = route(parameters, x, tokens)
    assert (np.asarray(routing.ids) == 4).any(axis=1).all()
    assert not (np.asarray(plain.ids) == 4).any(axis=1).all()
    own = np.take_along_axis(np.asarray(scores), np.asarray(routing.ids), 1)
    assert_close(routing.weights, 2.5 * own / own.sum(axis=1, keepdims=True), 1e-6)


@pytest.mark.parametrize("by_table", [False, True])
def test_padding_has_no_expert_and_no_weight(by_table):
    real = np.arange(TOKENS) % 3 > 0
    routing, _ = route(*given(by_table=by_table), real)
    np.testing.assert_array_equal(np.asarray(routing.ids)[~real], EXPERTS)
    np.testing.assert_array_equal(np.asarray(routing.weights)[~real], 0)
    whole, _ = route(*given(by_table=by_table))
    np.testing.assert_array_equal(np.asarray(routing.ids)[real], np.asarray(whole.ids)[real])
    assert router_lib.loads(routing.ids, EXPERTS).sum() == CHOSEN * real.sum()


@pytest.mark.parametrize("logit", [-1e4, -200.0, -100.0, -20.0, 0.0, 200.0])
def test_no_logit_makes_a_gradient_that_is_not_finite(logit):
    parameters, x, tokens = given(by_table=True)
    x, parameters["scores"] = np.ones((1, HIDDEN), np.float32), np.full((HIDDEN, EXPERTS), logit / HIDDEN, np.float32)

    def loss(scores):
        routing, all_scores = route(parameters | {"scores": scores}, x, tokens[:1])
        return routing.weights[0, 0] + all_scores.sum()

    value, gradient = jax.value_and_grad(loss)(parameters["scores"])
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_is_float32_for_bfloat16_states():
    """Else equal scores would be more often met, and other experts chosen."""
    parameters, x, tokens = given(by_table=False)
    rounded = jnp.asarray(x, jnp.bfloat16)
    routing, scores = route(parameters, rounded, tokens)
    exact, exact_scores = route(parameters, rounded.astype(jnp.float32), tokens)
    assert scores.dtype == routing.weights.dtype == jnp.float32
    np.testing.assert_array_equal(scores, exact_scores)
    np.testing.assert_array_equal(routing.ids, exact.ids)


@pytest.mark.parametrize(("size", "experts", "chosen"), [(257, 8, 2), (1000, 64, 6), (129_280, 384, 6), (5, 5, 5)])
def test_a_drawn_table_is_balanced_and_gives_no_token_an_expert_twice(size, experts, chosen):
    @hk.transform
    def draw():
        settings = Experts(count=experts, per_token=chosen)
        router_lib.Router(settings, size, by_table=True)(
            *(jnp.zeros(s, d) for s, d in (((1, 2), "f4"), (1, "i4"), (1, "?")))
        )

    tables = [np.asarray(draw.init(jax.random.key(seed))["router"]["table"]) for seed in (0, 1)]
    assert tables[0].dtype == np.int32
    for table in tables:
        assert all(len({*row}) == chosen for row in table[:500].tolist())
        assert np.ptp(np.bincount(table.reshape(-1), minlength=experts)) <= 1 + (chosen < experts)
    assert chosen == experts or (tables[0] != tables[1]).any()


def test_balance_loss_is_that_of_each_document():
    rng = np.random.default_rng(0)
    segments = np.array([[0] * 5 + [2] * 9 + [-1] * 2 + [1] * 4, [7] * 20])
    scores = rng.uniform(0.1, 2.0, (2, 20, EXPERTS)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(40)]).reshape(2, 20, CHOSEN)
    ids[segments < 0] = EXPERTS
    total = 0.0
    for row, document in ((0, 0), (0, 1), (0, 2), (1, 7)):
        own = segments[row] == document
        shares = scores[row][own] / scores[row][own].sum(axis=1, keepdims=True)
        for expert in range(EXPERTS):
            share = EXPERTS / (CHOSEN * own.sum()) * (ids[row][own] == expert).any(axis=1).sum()
            total += share * shares[:, expert].mean()
    arguments = (jnp.asarray(array, dtype) for array, dtype in ((scores, "f4"), (ids, "i4"), (segments, "i4")))
    found = router_lib.balance_loss(*arguments)
    assert found.count == 4
    assert float(found.total) == pytest.approx(total, rel=1e-5)


def test_balance_moves_towards_even_loads():
    params = {
        "blocks/layer_0_hca/experts/router": {"balance": jnp.zeros((2, 3)), "scores": jnp.ones((2, 4, 3))},
        "prefix_0_hca/experts/router": {"balance": jnp.ones(3)},
        "embed": {"embeddings": jnp.ones(3)},
    }
    loads = {"layer_0_hca": jnp.array([[0.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), "prefix_0_hca": jnp.array([9.0, 0.0, 0.0])}
    moved = balance.move(params, loads, 0.25)
    np.testing.assert_array_equal(
        moved["blocks/layer_0_hca/experts/router"]["balance"], [[0.25, -0.25, -0.25], [0, 0, 0]]
    )
    np.testing.assert_array_equal(moved["prefix_0_hca/experts/router"]["balance"], [0.75, 1.25, 1.25])
    for module, name in (("embed", "embeddings"), ("blocks/layer_0_hca/experts/router", "scores")):
        assert moved[module][name] is params[module][name]
    assert {name: float(value) for name, value in balance.metrics(moved, loads).items()} == {
        "expert_load": 3.0,
        "dead_experts": 3.0,
        "balance_range": 0.5,
    }
