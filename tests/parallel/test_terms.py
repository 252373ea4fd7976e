"""The terms of a loss on several devices: each a sum over all of them, divided once by what it counts itself."""

import os
import subprocess
import sys

import pytest

from tests.parallel.test_batch import devices

ON_FOUR_DEVICES = """
import functools
import haiku as hk
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType
from research.attention.spec import Spec
from research.metrics import Mean
from research.settings.config import base_config, read
from research.data.packing import NO_TARGET
from research.model import language_model
from research.parallel import batch as parallel
from research.training import optimizer, step

ROWS, S = 4, 32
config = base_config()
config.model.update(layers=("csa",), hidden=32, ffn_width=32)
config.attention.update(backend="dot_product", window=8, heads=2, head_width=16, rope_width=8, q_rank=16, out_rank=8)
config.attention.update(top_k=4, index_heads=2, index_head_width=8, indexer_loss_weight=0.7)
spec = Spec.make(read(config))
model = language_model.build(spec)
shapes = jax.eval_shape(lambda: step.init(spec, optimizer.build(Spec.make(read(config))), 0)).params
rng = np.random.default_rng(0)
params = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape) * 0.3, p.dtype), shapes)


class Recorded:  # an optimizer whose state is the gradient
    @staticmethod
    def update(gradients, state, params):
        return jax.tree.map(jnp.zeros_like, gradients), gradients


def mesh(devices):
    return jax.make_mesh((devices,), (parallel.AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def make_batch(targets, padded=(), cuts=(), longest=None, seq_len=S):
    # Row i asks for targets[i] tokens, the last ones; rows in `padded` are padding; documents are cut after `longest`.
    rng = np.random.default_rng(1)
    shape = (ROWS, seq_len)
    batch = {"inputs": rng.integers(0, 256, shape), "targets": np.full(shape, NO_TARGET)}
    segments = np.tile(np.arange(seq_len) // (longest or seq_len), (ROWS, 1))
    for row, number in enumerate(targets):
        if number:
            batch["targets"][row, -number:] = rng.integers(0, 256, number)
    for row, cut in cuts:
        segments[row, cut:] += 1
    segments[list(padded)] = -1
    positions = np.tile(np.arange(seq_len), (ROWS, 1))
    distances = np.where(batch["targets"] == NO_TARGET, 0, 4 + positions % 20)
    batch |= {"segments": segments, "positions": positions, "distances": distances}
    return {name: array.astype(np.int32) for name, array in batch.items()}


@functools.cache
def update(devices, parts):
    spread = mesh(devices) if devices > 1 else None
    settings = spec.settings.replace(train={"accumulate": parts})
    return jax.jit(step.make_update(Spec.make(settings), model, Recorded, spread))


def step_on(devices, batch, parts=1):
    state = step.State(params, jax.tree.map(jnp.zeros_like, params))
    (_, gradients), metrics = update(devices, parts)(state, parallel.distribute(batch, mesh(devices)))
    return jax.device_get((gradients, metrics))


def compare(devices, batch, parts=1):
    (one, metrics), (many, there) = step_on(1, batch), step_on(devices, batch, parts)
    assert metrics.keys() == there.keys() == {"loss", "tokens", "grad_norm", "indexer_kl", "going"}
    assert metrics["tokens"] == there["tokens"] and metrics["going"] and there["going"]
    for name in metrics:
        np.testing.assert_allclose(there[name], metrics[name], rtol=1e-5, err_msg=name)
    for (module, name, left), (_, _, right) in zip(*map(hk.data_structures.traverse, (one, many)), strict=True):
        off = abs(left - right).max() / max(abs(left).max(), 1e-30)
        assert off < 1e-5, (module, name, float(off))
    apart = optax.tree.norm(jax.tree.map(np.subtract, one, many))
    assert apart <= 1e-6 * metrics["grad_norm"], float(apart / metrics["grad_norm"])
    return metrics


def measure(devices, batch):
    of_rows = functools.partial(step.measures, language_model.build(spec, measure=True))
    total = jax.jit(parallel.totals(of_rows, mesh(devices)))
    return jax.device_get(total(params, parallel.distribute(batch, mesh(devices))))


asked = make_batch((1, 3, 16, 16), cuts=((0, 10), (3, 17)))
assert compare(2, asked)["tokens"] == 36  # 4 on one device, 32 on the other
compare(4, asked)
compare(2, make_batch((32, 9, 0, 0)))  # one device has nothing to predict, and its indexer learns none the less
compare(4, make_batch((32, 1, 32, 2), padded=(1,)))  # one has not a single real token
nothing = compare(4, make_batch((0, 0, 0, 0), padded=(0, 1, 2, 3)))
assert [float(nothing[name]) for name in ("loss", "tokens", "grad_norm", "indexer_kl")] == [0.0] * 4
untaught = compare(2, make_batch((32, 8, 0, 1), longest=3))  # no document has a whole entry
assert untaught["indexer_kl"] == 0.0 and untaught["loss"] > 1.0

# Micro-batches: what counts are the real tokens, not the rows, of each.
def make_uneven(*real):
    batch = make_batch((104,) * 4, seq_len=104)
    for row, number in enumerate(real):
        batch["segments"][row, number:] = -1
        batch["targets"][row, number:] = NO_TARGET
    return batch


for real in ((11, 101, 104, 3), (101, 11, 0, 0)):
    for devices, parts in ((1, 4), (2, 2)):
        assert compare(devices, make_uneven(*real), parts)["tokens"] == sum(real)

asked = make_batch((1, 0, 6, 5), padded=(1,), cuts=((0, 10),))
one, four = measure(1, asked), measure(4, asked)
assert one.keys() == four.keys() > {"loss", "indexer_kl", "indexer_recall", "accuracy", "accuracy_8_to_15"}
for name, mean in one.items():
    assert mean.count == four[name].count, name
    np.testing.assert_allclose(four[name].total, mean.total, rtol=1e-5, err_msg=name)
assert one["loss"].count == one["accuracy"].count == 12 and one["indexer_kl"].count == 3 * S

# Without a model: a term that no weight names is summed up, and moves nothing; totals of all devices over their counts.
def terms(trained, fixed, batch):
    real = batch["real"] > 0
    squares = jnp.where(real, (batch["x"] * trained * fixed) ** 2, 0.0)
    return {"a": Mean(squares.sum(), real.sum()), "b": Mean((trained * batch["x"]).sum(), jnp.int32(len(real)))}

rows = {"x": np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32), "real": np.arange(40).reshape(8, 5) % 7}
rows["real"][2:4] = 0
real = rows["real"] > 0
slope, means = jax.jit(parallel.gradients(terms, {"a": 2.0, "absent": 1.0}, mesh(4)))(
    jnp.float32(1.5), jnp.float32(3.0), parallel.distribute(rows, mesh(4))
)
squares = np.where(real, (rows["x"] * 3.0) ** 2, 0.0).astype(np.float64).sum()
np.testing.assert_allclose(slope, 2.0 * 2 * 1.5 * squares / real.sum(), rtol=1e-6)
np.testing.assert_allclose(means["a"].mean(), 1.5**2 * squares / real.sum(), rtol=1e-6)
assert (means["a"].count, means["b"].count) == (real.sum(), 8)
parts = parallel.gradients(terms, {"a": 2.0, "absent": 1.0}, mesh(4), parts=2)
in_parts, _ = jax.jit(parts)(jnp.float32(1.5), jnp.float32(3.0), parallel.distribute(rows, mesh(4)))
np.testing.assert_allclose(in_parts, slope, rtol=1e-6)
assert slope.sharding.is_fully_replicated
"""


@pytest.mark.slow
def test_each_term_is_divided_once_by_its_own_count():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | devices(4)
    done = subprocess.run([sys.executable, "-c", ON_FOUR_DEVICES], env=environment, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
