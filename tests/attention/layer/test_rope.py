import dataclasses
import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention.layer.rope import frequencies, rotate, rotate_back
from tests.parity import cases

ROPE, YARN = (dataclasses.replace(rope, angles="exact") for rope in (cases.ROPE, cases.YARN))
POSITIONS = np.array([0, 1, 40, 65_535, 1_048_575, 2**31 - 1, -1, -1_048_575, 1 - 2**31], np.int32)
every_rope = pytest.mark.parametrize(("rope", "compressed"), [(ROPE, False), (ROPE, True), (YARN, True)])

pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # NumPy's arrays serve here as well


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


def sines(positions, freqs) -> np.ndarray:
    """[2, S, pairs]: cosines and sines as `rotate` has them, for it turns (1, 0) into them."""
    x = jnp.zeros((1, len(positions), 2 * len(freqs))).at[..., ::2].set(1.0)
    turned = np.asarray(rotate(x, jnp.asarray(positions)[None], freqs))[0]
    return np.stack([turned[:, ::2], turned[:, 1::2]]).astype(np.float64)


def exact_sines(positions, freqs) -> np.ndarray:
    """As `sines`, by fractions: of a position times a frequency the whole turns are taken off before any rounding."""
    turn = 2 * fractions.Fraction("3.14159265358979323846264338327950288419716939937510")
    angles = [[float(int(t) * fractions.Fraction(float(freq)) % turn) for freq in freqs] for t in positions]
    return np.stack([np.cos(angles), np.sin(angles)])


@every_rope
def test_angles_are_exact_at_any_position(rope, compressed):
    freqs = frequencies(rope, 64, compressed=compressed)
    found, expected = sines(POSITIONS, freqs), exact_sines(POSITIONS, freqs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    at = list(POSITIONS).index(1_048_575)
    angles = 1_048_575 * np.asarray(freqs, np.float64)
    np.testing.assert_allclose(found[:, at], [np.cos(angles), np.sin(angles)], rtol=0, atol=1e-6)


@every_rope
def test_a_distance_turns_alike_at_any_position(rope, compressed):
    """What attention goes by: the angle between two tokens."""
    freqs, distance = frequencies(rope, 64, compressed=compressed), 64
    starts = np.array([0, 4_096, 131_072, 1_000_000, 2**31 - 1 - distance], np.int64)
    first, second = (np.array([1, 1j]) @ sines(t.astype(np.int32), freqs).swapaxes(0, 1) for t in (starts, starts + 64))
    relative = second * first.conj()
    np.testing.assert_allclose(relative, np.broadcast_to(relative[:1], relative.shape), rtol=0, atol=2e-6)


def test_frequencies_keep_the_precision_of_their_angles():
    """Published weights were trained with float32 ones; they are those of before, to the bit."""
    for rope, reference in ((ROPE, cases.ROPE), (YARN, cases.YARN)):
        exact, rounded = (frequencies(r, 64, compressed=True) for r in (rope, reference))
        assert (exact.dtype, rounded.dtype) == (np.float64, np.float32)
        np.testing.assert_allclose(rounded, exact, rtol=2e-6)
    plain = [160_000.0 ** (-i / 32) for i in range(32)]
    np.testing.assert_allclose(frequencies(ROPE, 64, compressed=True), plain, rtol=1e-15)


def test_reference_angles_are_float32_products():
    freqs = frequencies(cases.ROPE, 64, compressed=False)
    angles = POSITIONS.astype(np.float32)[:, None] * freqs[None]
    np.testing.assert_array_equal(sines(POSITIONS, freqs), jnp.stack([jnp.cos(angles), jnp.sin(angles)]))
    assert np.abs(sines(POSITIONS, freqs) - exact_sines(POSITIONS, freqs)).max() > 1e-2


def test_needs_no_64_bit_integers_on_a_tpu():
    freqs = frequencies(ROPE, 64, compressed=True)
    traced = jax.jit(lambda x, t: rotate_back(rotate(x, t, freqs), t, freqs)).trace(
        jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 256), jnp.int32)
    )
    program = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "ui32" in program
    assert not {"i64", "ui64", "f64"} & set(program.replace("x", " ").replace(">", " ").split())


@pytest.mark.parametrize("rope", [ROPE, YARN], ids=["plain", "yarn"])
def test_rotates_interleaved_pairs_of_the_trailing_channels(rope):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 12), dtype=np.float32)
    positions = np.array([0, 1, 40, 4_096, 9_000], np.int32)
    freqs = frequencies(rope, 8, compressed=True)
    ours = rotate(x[None], positions[None], freqs)[0]
    np.testing.assert_allclose(ours, turned(x, positions, freqs), atol=2e-6)
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
    positions = np.array([[1, 1_000_000, 2**31 - 1]], np.int32)
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


def test_refuses_unknown_angles():
    with pytest.raises(ValueError, match="angles='float32': must be one of exact, reference"):
        dataclasses.replace(ROPE, angles="float32")


def test_refuses_positions_that_are_no_integers():
    freqs = frequencies(ROPE, 2, compressed=False)
    with pytest.raises(ValueError, match="positions: float32, must be int32"):
        rotate(np.zeros((1, 1, 2), np.float32), np.zeros((1, 1), np.float32), freqs)


def test_refuses_to_rotate_more_than_there_is():
    with pytest.raises(ValueError, match="rope_width=8: must be at most the head's width, 6"):
        rotate(np.zeros((1, 1, 6), np.float32), np.zeros((1, 1), np.int32), frequencies(ROPE, 8, compressed=False))
