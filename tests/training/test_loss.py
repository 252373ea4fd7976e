import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.data.packing import NO_TARGET
from research.training import loss


def by_hand(logits, targets, segments):
    total, count = 0.0, 0
    for row in range(targets.shape[0]):
        for t in range(targets.shape[1]):
            if segments[row, t] >= 0 and targets[row, t] != NO_TARGET:
                scores = logits[row, t].astype(np.float64)
                total += math.log(np.exp(scores).sum()) - scores[targets[row, t]]
                count += 1
    return total / max(count, 1), count


@pytest.fixture
def example():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 7, 5)).astype(np.float32)
    targets = rng.integers(5, size=(2, 7)).astype(np.int32)
    segments = np.array([[0, 0, 0, 1, 1, -1, -1], [0, 0, 1, 1, 2, 2, -1]], np.int32)
    return logits, targets, segments


def test_is_the_mean_over_real_tokens(example):
    mean = loss.cross_entropy(*map(jnp.asarray, example))
    expected, count = by_hand(*example)
    assert int(mean.count) == count == 11
    np.testing.assert_allclose(mean.mean(), expected, rtol=1e-6)


def test_tokens_without_a_target_count_no_more_than_padding(example):
    logits, targets, segments = example
    targets[0, 1:4] = targets[1, 6] = NO_TARGET
    mean = loss.cross_entropy(*map(jnp.asarray, example))
    expected, count = by_hand(*example)
    assert int(mean.count) == count == 8
    np.testing.assert_allclose(mean.mean(), expected, rtol=1e-6)
    gradient = jax.grad(lambda x: loss.cross_entropy(x, targets, segments).mean())(logits)
    assert (np.abs(gradient).sum(axis=-1) > 0).sum() == count
    assert not gradient[0, 1:4].any()


def test_padding_changes_neither_the_loss_nor_its_gradient(example):
    logits, targets, segments = example
    padding = segments < 0
    other = np.where(padding[..., None], 1e4, logits), np.where(padding, 3, targets), segments

    def value(logits, targets, segments):
        return loss.cross_entropy(logits, targets, segments).mean()

    assert value(*other) == value(*example)
    gradient = jax.grad(value)(*example)
    assert np.all(np.asarray(gradient)[padding] == 0.0)
    assert np.all(np.asarray(gradient)[~padding] != 0.0)


def test_packed_loss_is_the_token_weighted_loss_of_its_documents(example):
    logits, targets, segments = example
    total = 0.0
    for row in range(2):
        for document in range(3):
            inside = segments[row] == document
            if inside.any():
                alone = logits[row, inside][None], targets[row, inside][None], np.zeros((1, inside.sum()), np.int32)
                total += float(loss.cross_entropy(*alone).total)
    np.testing.assert_allclose(loss.cross_entropy(*example).mean(), total / 11, rtol=1e-6)


def test_is_computed_in_float32(example):
    logits, targets, segments = example
    rounded = jnp.asarray(logits, jnp.bfloat16)
    value = loss.cross_entropy(rounded, targets, segments).mean()
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, by_hand(np.asarray(rounded, np.float32), targets, segments)[0], rtol=1e-6)


def test_no_real_token_is_a_loss_of_zero(example):
    logits, targets, segments = example
    nothing = loss.cross_entropy(logits, targets, np.full_like(segments, -1))
    assert (float(nothing.total), int(nothing.count), float(nothing.mean())) == (0.0, 0, 0.0)


def test_a_uniform_guess_among_256_bytes_costs_eight_bits():
    mean = loss.cross_entropy(jnp.zeros((1, 3, 256)), jnp.zeros((1, 3), jnp.int32), jnp.zeros((1, 3), jnp.int32))
    assert loss.bits_per_byte(float(mean.mean())) == pytest.approx(8.0, abs=1e-6)
