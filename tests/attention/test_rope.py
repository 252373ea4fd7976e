import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from research.attention.rope import frequencies, rotate, rotate_back
from tests.parity.cases import ROPE, YARN


def turned(x: np.ndarray, positions: np.ndarray, freqs: np.ndarray) -> np.ndarray:
    """Oracle in complex numbers: [S, D] turned pair by pair."""
    x = x.astype(np.float64)
    start = x.shape[-1] - 2 * len(freqs)
    for t, position in enumerate(positions):
        for i, freq in enumerate(freqs):
            plane = slice(start + 2 * i, start + 2 * i + 2)
            z = complex(*x[t, plane]) * np.exp(1j * float(position) * float(freq))
            x[t, plane] = z.real, z.imag
    return x


@pytest.mark.parametrize(("compressed", "theta"), [(False, 10_000.0), (True, 160_000.0)])
def test_frequencies_by_layer_kind(compressed, theta):
    expected = [theta ** (-2 * i / 8) for i in range(4)]
    np.testing.assert_allclose(frequencies(ROPE, 8, compressed=compressed), expected, rtol=5e-7)


def test_yarn_stretches_only_the_slow_pairs():
    rope = dataclasses.replace(ROPE, yarn_factor=16.0, yarn_original_length=4_096)
    width = 32
    plain = frequencies(ROPE, width, compressed=True)
    turns = 4_096 * plain.astype(np.float64) / (2 * math.pi)
    first_slow = np.flatnonzero(turns < 1)[0]  # the ramp ends on the first pair with less than one turn ...
    last_fast = np.flatnonzero(turns > 32)[-1]  # ... and starts on the last with more than 32
    expected = plain.astype(np.float64)
    for i in range(width // 2):
        stretched = min(max((i - last_fast) / (first_slow - last_fast), 0), 1)
        expected[i] *= 1 - stretched + stretched / 16
    assert 0 < last_fast < first_slow - 1 < width // 2 - 2  # all three parts are there
    np.testing.assert_allclose(frequencies(rope, width, compressed=True), expected, rtol=5e-7)


def test_yarn_leaves_sliding_layers_alone():
    np.testing.assert_array_equal(frequencies(YARN, 8, compressed=False), frequencies(ROPE, 8, compressed=False))


@pytest.mark.parametrize("rope", [ROPE, YARN], ids=["plain", "yarn"])
def test_rotates_interleaved_pairs_of_the_trailing_channels(rope):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 12), dtype=np.float32)
    positions = np.array([0, 1, 40, 4_096, 9_000], np.int32)
    freqs = frequencies(rope, 8, compressed=True)
    ours = rotate(x[None], positions[None], freqs)[0]
    # An angle of up to 450 radians is rounded to float32 by at most 1.5e-5.
    np.testing.assert_allclose(ours, turned(x, positions, freqs), atol=1e-4)
    np.testing.assert_array_equal(ours[:, :4], x[:, :4])
    np.testing.assert_allclose(jnp.square(ours).sum(-1), np.square(x).sum(-1), rtol=1e-6)  # attention factor 1


def test_heads_share_the_rotation():
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 8), dtype=np.float32)
    positions = np.array([[0, 1, 2], [7, 8, 9]], np.int32)
    freqs = frequencies(ROPE, 6, compressed=False)
    ours = rotate(x, positions, freqs)
    for head in range(4):
        np.testing.assert_array_equal(ours[:, :, head], rotate(x[:, :, head], positions, freqs))


def test_rotate_back_is_the_inverse():
    x = np.random.default_rng(0).standard_normal((1, 3, 8), dtype=np.float32)
    positions = np.array([[1, 4_097, 1_000_000]], np.int32)
    freqs = frequencies(ROPE, 8, compressed=False)
    np.testing.assert_allclose(rotate_back(rotate(x, positions, freqs), positions, freqs), x, atol=1e-6)


def test_is_computed_in_float32():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 8)), jnp.bfloat16)
    positions = np.array([[0, 3, 500, 5_000]], np.int32)
    freqs = frequencies(ROPE, 8, compressed=False)
    expected = rotate(x.astype(jnp.float32), positions, freqs).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rotate(x, positions, freqs), expected)


@pytest.mark.parametrize("width", [-2, 0, 7])
def test_refuses_an_impossible_rope_width(width):
    with pytest.raises(ValueError, match=f"rope_width={width}: must be a positive even number"):
        frequencies(ROPE, width, compressed=True)


def test_refuses_to_rotate_more_than_there_is():
    with pytest.raises(ValueError, match="rope_width=8: must be at most the head's width, 6"):
        rotate(np.zeros((1, 1, 6), np.float32), np.zeros((1, 1), np.int32), frequencies(ROPE, 8, compressed=False))
