"""The whole model: streams, experts of both routers, and layers before the stack."""

import functools
import os
import shutil
import subprocess
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention.attend import Documents
from research.attention.spec import Spec
from research.model import language_model
from research.runs.folder import read_starts
from research.settings.config import base_config, read
from research.training import flops, optimizer
from research.training import step as step_lib
from tests import tiny
from tests.oracles import assert_close
from tests.parallel.test_batch import devices
from tests.training.test_run import final_state, folder_of, make, rows, train

SEQ_LEN = 64
EXPERTS = {"experts.count": 5, "experts.per_token": 2, "experts.hash_layers": 1, "experts.balance_weight": 0.1}
WHOLE = {
    "model.prefix": ("sliding",),
    "model.layers": ("csa", "hca"),
    "model.repeats": 2,
    "model.streams": 3,
    "model.swiglu_limit": 0.5,
    "model.tied_head": False,
    "attention.window": 8,
    "attention.backend": "auto",
    "attention.csa_ratio": 4,
    "attention.top_k": 3,
    "attention.index_heads": 2,
    "attention.index_head_width": 8,
    **EXPERTS,
}
UNDERSCORED = {name.replace(".", "__"): value for name, value in WHOLE.items()}


def config_of(**overrides):
    config = tiny.get_config()
    config.update_from_flattened_dict(WHOLE | {name.replace("__", "."): value for name, value in overrides.items()})
    return config


@functools.cache
def spec(**overrides) -> Spec:
    return Spec.make(read(config_of(**overrides)), "cpu")


@functools.cache
def parameters(**overrides):
    """Large enough for every token to tell, with tables in which no token has an expert twice."""
    params = step_lib.init(spec(**overrides), optimizer.build(spec(**overrides)), 0).params
    rng = np.random.default_rng(0)

    def drawn(module, name, value):
        if name == "table":
            return value
        return jnp.asarray(rng.standard_normal(value.shape) * (1.0 if name == "balance" else 0.3), value.dtype)

    return hk.data_structures.map(drawn, params)


@functools.cache
def applied(**overrides):
    return jax.jit(language_model.build(spec(**overrides)).apply)


def documents(segments):
    """Of rows of segments: positions count from 0 in each document."""
    segments = np.atleast_2d(segments)
    positions = np.array([[int((row[:i] == row[i]).sum()) for i in range(len(row))] for row in segments])
    return Documents(jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32))


@functools.cache
def tokens():
    """No two alike, so that an embedding belongs to one place."""
    return jnp.asarray(np.random.default_rng(1).permutation(256)[None, :SEQ_LEN], jnp.int32)


ONE = (0,) * SEQ_LEN
PACKED = (0,) * 20 + (-1,) * 12 + (1,) * 26 + (-1,) * 6


def test_past_does_not_depend_on_the_future():
    place = 41
    before = applied()(parameters(), None, tokens(), documents(ONE)).logits
    changed = tokens().at[0, place].set(200)
    after = applied()(parameters(), None, changed, documents(ONE)).logits
    np.testing.assert_array_equal(after[:, :place], before[:, :place])
    assert (np.asarray(after[:, place:]) != np.asarray(before[:, place:])).any(axis=-1).all()


def reached(segments, place):
    """Which places' embeddings the logits of a place have a gradient to."""

    def logits(params):
        weights = jnp.asarray(np.random.default_rng(2).standard_normal(257), jnp.float32)
        return applied()(params, None, tokens(), documents(segments)).logits[0, place] @ weights

    gradient = jax.grad(logits, allow_int=True)(parameters())["embed"]["embeddings"]
    return np.flatnonzero(np.abs(gradient[tokens()[0]]).max(axis=-1) > 0)


def test_gradients_reach_what_is_before_in_the_same_document():
    assert reached(ONE, 41).tolist() == list(range(42))
    assert reached(PACKED, 50).tolist() == list(range(32, 51))


def test_documents_of_a_row_are_as_if_alone_and_padding_has_no_part():
    packed = applied()(parameters(), None, tokens(), documents(PACKED))
    for document, start, length in ((0, 0, 20), (1, 32, 26)):
        alone = jnp.zeros_like(tokens()).at[0, :length].set(tokens()[0, start : start + length])
        segments = (document,) * length + (-1,) * (SEQ_LEN - length)
        expected = applied()(parameters(), None, alone, documents(segments)).logits[0, :length]
        assert_close(packed.logits[0, start : start + length], expected, 1e-5)
    padding = np.array(PACKED) < 0
    other = applied()(parameters(), None, jnp.where(padding[None], 7, tokens()), documents(PACKED))
    assert set(packed.loads) == {"prefix_0_sliding", "layer_0_csa", "layer_1_hca"}
    for name, load in packed.loads.items():
        assert load.shape == (() if name.startswith("prefix") else (2,)) + (5,)
        assert (load.sum(axis=-1) == 2 * 46).all()
        np.testing.assert_array_equal(load, other.loads[name])
    assert {name: int(mean.count) for name, mean in packed.means.items()} == {
        "indexer_kl": 2 * 46,
        "balance": 4 * 2,  # documents in layers whose experts are chosen by score
        "streams_row_error": 5 * 2 * 46,
        "streams_gain": 46,
    }
    for name, mean in packed.means.items():
        assert float(mean.total) == pytest.approx(float(other.means[name].total), rel=1e-6), name


def test_one_expert_that_serves_all_is_a_feed_forward_layer():
    """The routed one alone, with weight 1, the shared one left out."""
    one = {"experts__per_token": 1, "experts__count": 1, "experts__shared": 0, "experts__scale": 1.0}
    one |= {"experts__hash_layers": 0, "experts__balance_weight": 0.0, "model__streams": 1}
    dense = {name.replace(".", "__"): base_config().experts[name.partition(".")[2]] for name in EXPERTS}
    dense |= {"model__streams": 1}
    params, plain = parameters(**one), {}
    for module, name, value in hk.data_structures.traverse(params):
        if module.endswith("/experts"):
            at = value.shape.index(1, value.ndim - 3)
            plain.setdefault(module.removesuffix("/experts"), {})[f"ffn_{name}"] = value.squeeze(at)
        elif not module.endswith("/router"):
            plain.setdefault(module, {})[name] = value
    found = applied(**one)(params, None, tokens(), documents(PACKED)).logits
    expected = applied(**dense)(plain, None, tokens(), documents(PACKED)).logits
    real = np.array(PACKED) >= 0
    assert_close(found[:, real], expected[:, real], 1e-5)


def batch():
    rng = np.random.default_rng(0)
    segments = np.array([PACKED, ONE, PACKED[::-1], PACKED])
    texts = rng.integers(0, 256, (2, *segments.shape))
    arrays = {"inputs": texts[0], "targets": texts[1], "positions": documents(segments).positions, "segments": segments}
    return {name: np.asarray(array, np.int32) for name, array in arrays.items()}


def updated(**overrides):
    model = spec(data__batch_size=4, **overrides)
    transform = optimizer.build(model)
    state = step_lib.State(parameters(), transform.init(parameters()))
    update = jax.jit(step_lib.make_update(model, language_model.build(model), transform))
    return state, *update(state, batch())


def test_an_update_moves_balances_by_their_loads_and_tables_never():
    before, after, metrics = updated()
    loads = applied()(before.params, None, batch()["inputs"], step_lib.documents(batch())).loads
    untrained = 0
    for module, name, value in hk.data_structures.traverse(before.params):
        new = after.params[module][name]
        if name == "table":
            np.testing.assert_array_equal(new, value)
            untrained += 1
        elif name == "balance":
            load = np.asarray(next(load for layer, load in loads.items() if layer in module), np.float64)
            moved = 1e-3 * np.sign(load.mean(axis=-1, keepdims=True) - load)
            np.testing.assert_allclose(new, np.asarray(value) + moved, rtol=1e-6)
            untrained += 1
        else:
            assert (np.asarray(new) != np.asarray(value)).any(), (module, name)
    assert untrained == 3
    most = max((np.asarray(load) / np.asarray(load).mean(axis=-1, keepdims=True)).max() for load in loads.values())
    assert float(metrics["expert_load"]) == pytest.approx(most)
    expected = {"loss", "tokens", "grad_norm", "going", "indexer_kl", "balance", "streams_row_error", "streams_gain"}
    assert metrics.keys() == expected | {"expert_load", "dead_experts", "balance_range"}


def test_nothing_moves_where_the_loss_is_not_finite():
    model = spec(data__batch_size=4)
    transform = optimizer.build(model)
    params = hk.data_structures.map(
        lambda module, name, value: value * jnp.nan if name == "head" else value, parameters()
    )
    update = jax.jit(step_lib.make_update(model, language_model.build(model), transform))
    state, metrics = update(step_lib.State(params, transform.init(params)), batch())
    assert not metrics["going"]
    jax.tree.map(np.testing.assert_array_equal, state.params, params)


@pytest.mark.parametrize("stage", ["warmup", pytest.param("dense", marks=pytest.mark.slow)])
def test_balances_move_with_the_model_that_they_serve(stage):
    before, after, _ = updated(attention__csa_stage=stage)
    moved = {
        name: any((np.asarray(after.params[module][name]) != np.asarray(value)).any() for module, value in found)
        for name in ("balance", "scores")
        if (found := [(m, v) for m, n, v in hk.data_structures.traverse(before.params) if n == name])
    }
    assert moved == dict.fromkeys(("balance", "scores"), stage == "dense")


@pytest.mark.slow
def test_micro_batches_move_as_one_batch_does():
    _, one, metrics = updated()
    _, four, there = updated(train__accumulate=4)
    for name, value in metrics.items():
        rounding = 1e-8 if name == "streams_row_error" else 0.0  # what is left of 1 - 1
        np.testing.assert_allclose(there[name], value, rtol=1e-5, atol=rounding, err_msg=name)
    for module, name, value in hk.data_structures.traverse(one.params):
        if name in ("balance", "table"):
            np.testing.assert_array_equal(four.params[module][name], value)


ON_TWO_DEVICES = """
import jax, numpy as np
import haiku as hk
from jax.sharding import AxisType
from research.model import language_model
from research.parallel import batch as parallel
from research.training import optimizer, step as step_lib
from tests.model import test_whole as whole

model = whole.spec(data__batch_size=4)
transform = optimizer.build(model)
state = step_lib.State(whole.parameters(), transform.init(whole.parameters()))
found = []
for count in (1, 2):
    mesh = jax.make_mesh((count,), (parallel.AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    update = jax.jit(step_lib.make_update(model, language_model.build(model), transform, mesh))
    found.append(jax.device_get(update(state, parallel.distribute(whole.batch(), mesh))))
(one, metrics), (two, there) = found
for name, value in metrics.items():
    np.testing.assert_allclose(there[name], value, rtol=1e-5, atol=1e-8, err_msg=name)
for module, name, value in hk.data_structures.traverse(one.params):
    if name in ("balance", "table"):
        np.testing.assert_array_equal(two.params[module][name], value)
"""


@pytest.mark.slow
def test_two_devices_count_and_move_as_one():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | devices(2)
    done = subprocess.run([sys.executable, "-c", ON_TWO_DEVICES], env=environment, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_flops_count_the_experts_that_a_token_is_given_to():
    def found(**overrides):
        model = spec(**overrides)
        shapes = jax.eval_shape(lambda: step_lib.init(model, optimizer.build(model), 0)).params
        return flops.per_token(model, shapes)

    hidden, width, layers = 32, 32, 5
    one_more = found(experts__per_token=3) - found()
    assert one_more == 6 * layers * 3 * hidden * width
    assert found(experts__count=6) - found() == 6 * layers * hidden  # of the router
    assert found() - found(experts__shared=0) == 6 * layers * 3 * hidden * width


@pytest.mark.slow
def test_a_run_tells_of_its_experts(tmp_path):
    folder = train(make(tmp_path, "run", **UNDERSCORED, train__steps=6))
    assert {"expert_load", "dead_experts", "balance_range", "balance", "streams_gain"} <= rows(folder)[-1].keys()
    assert "val_balance" in rows(folder)[-1]


@pytest.mark.slow
def test_a_run_that_is_resumed_ends_as_if_it_had_not_been_stopped(tmp_path):
    """With its balances and tables, to the last bit."""
    whole, parts = (make(tmp_path, name, **UNDERSCORED, train__steps=6) for name in ("whole", "parts"))
    train(whole)
    parts.train.checkpoint_every = 3
    train(parts)
    folder = folder_of(parts)
    shutil.rmtree(folder / "checkpoints" / "6")
    (folder / "summary.json").unlink()
    train(parts)
    assert rows(folder) == rows(folder_of(whole))
    found = [final_state(config) for config in (whole, parts)]
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert found[0].params["prefix_0_sliding/experts/router"]["table"].dtype == jnp.int32
    assert len(read_starts(folder)) == 2
