import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention.attend import Documents
from research.attention.spec import Spec
from research.model import language_model
from research.settings.config import read
from research.training import optimizer
from tests import tiny


@pytest.fixture
def config():
    config = tiny.get_config()
    config.optimizer.learning_rate = 0.1
    config.optimizer.final_fraction = 0.2
    config.optimizer.warmup_steps = 4
    config.train.steps = 24
    return config


def test_learning_rate_warms_up_and_decays(config):
    rate = optimizer.learning_rate(read(config))
    np.testing.assert_allclose([rate(i) for i in range(5)], [0.02, 0.04, 0.06, 0.08, 0.1], rtol=1e-6)
    for update in (9, 14, 24):
        cosine = 0.5 * (1 + math.cos(math.pi * (update - 4) / 20))
        np.testing.assert_allclose(rate(update), 0.1 * (0.2 + 0.8 * cosine), rtol=1e-5)
    assert rate(24) == pytest.approx(0.02)


def test_no_warm_up_starts_at_the_full_rate(config):
    config.optimizer.warmup_steps = 0
    assert optimizer.learning_rate(read(config))(0) == pytest.approx(0.1)


def test_first_update_is_adamw_by_hand(config):
    config.optimizer.clip_norm = 1.0
    config.optimizer.weight_decay = 0.5
    updates = optimizer.build(Spec.make(read(config)))
    params = {"layer": {"w": jnp.full((2, 2), 3.0), "scale": jnp.full((2,), 3.0)}}
    grads = jax.tree.map(lambda x: jnp.full_like(x, 10.0), params)
    changes, _ = updates.update(grads, updates.init(params), params)
    # The first update of Adam is the gradient's sign, whatever its size; decay adds half of a matrix's weights.
    np.testing.assert_allclose(changes["layer"]["scale"], -0.02, rtol=1e-5)
    np.testing.assert_allclose(changes["layer"]["w"], -0.02 * (1 + 0.5 * 3.0), rtol=1e-5)


def test_gradients_are_clipped_by_their_global_norm(config):
    updates = optimizer.build(Spec.make(read(config)))
    params = {"layer": {"w": jnp.zeros((2, 2)), "scale": jnp.zeros((2,))}}
    state = updates.init(params)
    large = jax.tree.map(lambda x: jnp.full_like(x, 100.0), params)
    _, state = updates.update(large, state, params)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2, 2)]
    clipped = 1.0 / math.sqrt(6)  # six equal entries of norm 1 together
    np.testing.assert_allclose(moments[0], 0.1 * clipped, rtol=1e-5)
    np.testing.assert_allclose(moments[1], 0.05 * clipped**2, rtol=1e-5)


def test_decay_pulls_at_the_matrices_of_the_model_alone():
    config = tiny.get_config()
    config.model.layers = ("sliding", "csa", "hca")
    config.model.tied_head = False
    model = language_model.build(Spec.make(read(config)))
    tokens = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    params = jax.eval_shape(lambda key, t: model.init(key, t, Documents(t, t)), jax.random.key(0), tokens)
    decayed = optimizer.decayed(params)
    stacked = {module for module in params if module.startswith("blocks")}
    assert len(stacked) > 10
    for module, name, value in hk.data_structures.traverse(params):
        is_matrix = value.ndim - (module in stacked) >= 2 and "bias" not in name
        assert decayed[module][name] == is_matrix, f"{module}/{name} {value.shape}"
