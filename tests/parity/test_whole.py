"""The whole model, imported, against the fixture that `make_fixtures.py` wrote from transformers' DeepSeek-V4."""

import functools

import numpy as np
import pytest

from research.model import feed_forward, language_model, router, streams, swiglu
from tests import oracles
from tests.parity import mutation, whole


@functools.cache
def answers() -> dict[str, np.ndarray]:
    with np.load(whole.FOLDER / "answers.npz", allow_pickle=False) as arrays:
        return dict(arrays)


@functools.cache
def settings():
    return whole.settings(whole.FOLDER / "weights")


@functools.cache
def params():
    return whole.from_folder(whole.FOLDER / "weights", settings())


def test_it_has_every_kind_of_layer_both_routers_a_prefix_and_repeats():
    model = settings().model
    assert (model.prefix, model.layers, model.repeats) == (("sliding",), ("csa", "hca"), 2)
    assert settings().experts.hash_layers == 1
    assert settings().rope.yarn_factor == 16


def test_logits():
    oracles.assert_close(whole.logits(settings(), params(), answers()["tokens"]), answers()["logits"], 1e-5)


def test_gradients():
    """By every parameter that has one there: the reference's loss reaches no indexer, and no balance of experts."""
    expected = whole.from_folder(whole.FOLDER / "gradients", settings(), untrained=False)
    ours = whole.gradients(settings(), params(), answers()["tokens"], answers()["cotangent"])
    whole.assert_gradients_close(ours, expected)


MISTAKES = {
    "comb not transposed": (streams, "bsij,bsie->bsje", "bsji,bsie->bsje"),
    "post without its factor": (streams, "post = 2 * jax.nn", "post = jax.nn"),
    "pre and post exchanged": (streams, "pre, post, comb = _gates", "post, pre, comb = _gates"),
    "softmax over columns": (streams, "jax.nn.softmax(logits, axis=-1)", "jax.nn.softmax(logits, axis=-2)"),
    "columns before rows": (streams, "divided(divided(m, -1), -2)", "divided(divided(m, -2), -1)"),
    "a round too few": (streams, "length=rounds - 1", "length=rounds - 2"),
    "a row pass too many": (streams, "axis=-1) + eps, -2)", "axis=-1) + eps, -1) / 1"),
    "the gates' epsilon left out": (streams, "pre = jax.nn.sigmoid(gates) + eps", "pre = jax.nn.sigmoid(gates)"),
    "the norm's epsilon that of the gates": (
        streams,
        "_gates(streams, settings.norm_eps",
        "_gates(streams, settings.streams_eps",
    ),
    "a mean at the end": (
        language_model,
        "streams.Collapse(settings)(x)",
        "(streams.Collapse(settings)(x), x.mean(2))[1]",
    ),
    "streams that share the embedding": (
        language_model,
        "settings.streams, x.shape[2]))",
        "settings.streams, x.shape[2])) / 4",
    ),
    "bias in the weights": (
        router,
        "take_along_axis(scores,",
        "take_along_axis(scores + (0 if self.by_table else balance[None]),",
    ),
    "bias that does not choose": (router, "+ balance[None], chosen", ", chosen"),
    "weights not normalised": (
        router,
        "self.settings.scale / (weights.sum(axis=-1, keepdims=True) + 1e-20)",
        "self.settings.scale",
    ),
    "softplus without its root": (router, "scores = jnp.sqrt(", "scores = jnp.abs("),
    "no limit": (swiglu, "if limit:", "if False:"),
    "a gate limited from below": (swiglu, "jnp.where(gate > limit, limit, gate)", "jnp.clip(gate, -limit, limit)"),
    "up limited from above alone": (swiglu, "jnp.where(up < -limit, -limit, up)", "up"),
    "no limit in the shared expert": (
        feed_forward,
        'feed_forward(x, model, "shared")',
        'feed_forward(x, __import__("dataclasses").replace(model, swiglu_limit=0.0), "shared")',
    ),
    "the shared expert scaled": (feed_forward, '"shared").astype(jnp.float32)', '"shared").astype(jnp.float32) * 1.5'),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "no limit" else pytest.mark.slow) for name in MISTAKES]
)
def test_the_fixture_tells_a_mistake(name, monkeypatch):
    """Each made by somebody before, or near; the tolerance is missed by a factor of two at least."""
    mutation.apply(monkeypatch, *MISTAKES[name])
    wrong, right = whole.logits(settings(), params(), answers()["tokens"]), answers()["logits"]
    assert np.abs(wrong - right).max() > 2e-5 * np.abs(right).max()
