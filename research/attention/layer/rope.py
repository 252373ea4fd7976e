"""Rotary position embedding on the trailing channels of a head, in interleaved pairs, in float32.

Channels `2i` and `2i + 1` of the trailing `rope_width` are a plane that turns by `position * frequency[i]`.
Keys serve as values, so an attention output carries the rotation of what it attended to: `rotate_back` undoes it
at the query's position, and what remains depends on relative positions alone. Source: DeepSeek-V4, section 2.3.

A product in float32 keeps 24 bits of the angle, whole turns included: at position 1,000,000 two neighbours are turned
against each other by an angle that is off by up to 0.06. Of whole turns nothing is left in a phase that is counted in
fractions of a turn by integers, which wrap around: it is as exact at the last position as at the first.
"""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt32

from research.attention.product import product
from research.settings.attention import Rope

Arrays = Array | np.ndarray
Frequencies = np.ndarray  # [rope_width // 2] radians per position, float64 or float32


def frequencies(rope: Rope, rope_width: int, *, compressed: bool) -> Frequencies:
    """Radians per position of each channel pair.

    Args:
      rope: thetas and YaRN settings.
      rope_width: rotated channels, even.
      compressed: whether the layer is a CSA or HCA one: they have a theta of their own, and they alone have YaRN.

    Returns:
      float64 under `angles='exact'`, float32 under 'reference'; `rotate` goes by it.

    Raises:
      ValueError: rope_width is not a positive even number.
    """
    if rope_width <= 0 or rope_width % 2:
        raise ValueError(f"rope_width={rope_width}: must be a positive even number")
    theta = rope.compressed_theta if compressed else rope.theta
    # The reference's go in float32 step by step, as published weights were trained: distance multiplies every ulp.
    real = np.float32 if rope.angles == "reference" else np.float64
    exponents = np.arange(0, rope_width, 2, dtype=real) / real(rope_width)
    plain = real(1) / real(theta) ** exponents
    if not compressed or rope.yarn_factor == 1:
        return plain
    kept = _yarn_kept(rope, theta, rope_width, real)
    return plain / real(rope.yarn_factor) * (1 - kept) + plain * kept


def rotate(
    x: Float[Arrays, "B S *heads D"], positions: Int32[Arrays, "B S"], freqs: Frequencies
) -> Float[Array, "B S *heads D"]:
    """Turns the trailing `2 * len(freqs)` channels by their positions.

    Args:
      x: what is rotated.
      positions: of either sign.
      freqs: from `frequencies`. By float64 ones the angle is within 5e-7 of its value at every position; by float32
        ones it is their product with the position in float32, off by up to 2^-24 of it.

    Returns:
      In x's dtype.

    Raises:
      ValueError: x has fewer channels than are to be rotated, or positions are not int32.
    """
    rope_width = 2 * len(freqs)
    if rope_width > x.shape[-1]:
        raise ValueError(f"rope_width={rope_width}: must be at most the head's width, {x.shape[-1]}")
    if positions.dtype != jnp.int32:
        raise ValueError(f"positions: {positions.dtype}, must be int32")
    angles_of = _angles if freqs.dtype == np.float64 else _rounded_angles
    angles = angles_of(positions[..., None], freqs.repeat(2)[None, None])
    angles = angles.reshape(*positions.shape, *(1,) * (x.ndim - 3), rope_width)
    still, turning = jnp.split(x, [x.shape[-1] - rope_width], axis=-1)
    turning = turning.astype(jnp.float32)
    turned = turning * jnp.cos(angles) + _quarter_turn(turning) * jnp.sin(angles)
    return jnp.concatenate([still, turned.astype(x.dtype)], axis=-1)


def rotate_back(
    x: Float[Arrays, "B S *heads D"], positions: Int32[Arrays, "B S"], freqs: Frequencies
) -> Float[Array, "B S *heads D"]:
    """The inverse of `rotate`."""
    return rotate(x, -positions, freqs)


_RADIANS = fractions.Fraction("6.28318530717958647692528676655900576839433879875021")  # of a turn


def _angles(positions: Int32[Array, "B S 1"], freqs: np.ndarray) -> Float32[Array, "B S width"]:
    """Radians from -pi to pi, float32, of int32 positions times float64 radians per position.

    A position advances the phase by a whole number of 2^-64 turns, in a high and a low word of 32 bits. Of its product
    with the position, modulo a turn, the high word is kept, which is off by less than 2^-31 turns, 3e-9 radians.
    """
    steps = [round(fractions.Fraction(freq) / _RADIANS * 2**64) % 2**64 for freq in freqs.flat]
    high, low = (
        np.array(words, np.uint32).reshape(freqs.shape)
        for words in zip(*(divmod(s, 2**32) for s in steps), strict=True)
    )
    distance = jnp.abs(positions).astype(jnp.uint32)  # of the least int32 too, which is its own absolute value
    phase = distance * high + _high_word(distance, low)
    signed = jax.lax.bitcast_convert_type(phase, jnp.int32)  # turns below a half, and the others less a turn
    radians = signed.astype(jnp.float32) * np.float32(2 * math.pi / 2**32)
    return jnp.where(positions < 0, -radians, radians)


def _high_word(a: UInt32[Array, "B S 1"], b: np.ndarray) -> UInt32[Array, "B S width"]:
    """The upper 32 bits of a product of uint32, in which no 64-bit integers are needed."""
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    middle = a_high * b_low + (a_low * b_low >> half)
    carried = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (carried >> half)


def _rounded_angles(positions: Int32[Array, "B S 1"], freqs: np.ndarray) -> Float32[Array, "B S width"]:
    """As published weights were trained with: float32 positions times float32 radians per position."""
    return positions.astype(jnp.float32) * freqs


def _quarter_turn(x: Float32[Array, "*shape width"]) -> Float32[Array, "*shape width"]:
    """Each pair of channels (a, b) to (-b, a).

    As an exact product with a matrix of 0 and +-1: a TPU's compiler takes three times as long over the whole layer
    where every second channel is sliced out instead (LOG.md).
    """
    matrix = np.kron(np.eye(x.shape[-1] // 2, dtype=np.float32), np.array([[0, 1], [-1, 0]], np.float32))
    return product("...i,io->...o", x, matrix)


def _yarn_kept(rope: Rope, theta: float, rope_width: int, real: type) -> np.ndarray:
    """How much of each pair's own frequency YaRN keeps: 1 for the fast pairs, 0 for the slow, a ramp between.

    A pair is fast or slow by its turns within the original length (Peng et al. 2023, "NTK-by-parts"); the ramp's
    ends are rounded outwards to whole pairs.
    """

    def pair_with_turns(turns: float) -> float:
        return rope_width * math.log(rope.yarn_original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with_turns(rope.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(rope.yarn_beta_slow)), rope_width - 1)
    ramp = (np.arange(rope_width // 2, dtype=real) - low) / real(max(high - low, 1e-3))
    return 1 - np.clip(ramp, 0, 1)
