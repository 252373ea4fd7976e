"""Rotary position embedding (RoPE) of the last `rope_width` channels of a head, in interleaved pairs, in float32.

Channels `2i` and `2i + 1` of the last `rope_width` are rotated by the angle `position * freqs[i]`. Since keys are also
the values, an attention output contains the rotations of the keys. `rotate_back` rotates it back by the position of the
query, so that it only depends on relative positions. Source: DeepSeek-V4, section 2.3.

Precision: a float32 angle has 24 bits, including whole turns, so at position 1,000,000 the angle between two
neighbours has an error of up to 0.06. By default angles are therefore computed in integer fractions of a turn, which
wrap around at whole turns. Their error does not grow with the position.
"""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int32, UInt32

from research.attention.product import product
from research.settings.attention import Rope

Arrays = Array | np.ndarray
Frequencies = Float[np.ndarray, " pairs"]  # radians per position, float64 or float32


def frequencies(rope: Rope, rope_width: int, *, compressed: bool) -> Frequencies:
    """Radians per position of each pair of channels.

    Args:
      rope: thetas and YaRN settings.
      rope_width: number of rotated channels, even.
      compressed: whether the layer has entries (CSA, HCA). Such layers have another theta, and only they use YaRN.

    Returns:
      In float64 with `angles='exact'`, in float32 with 'reference'. The dtype determines how `rotate` computes angles.

    Raises:
      ValueError: rope_width is not a positive even number.
    """
    if rope_width <= 0 or rope_width % 2:
        raise ValueError(f"rope_width={rope_width}: must be a positive even number")
    theta = rope.compressed_theta if compressed else rope.theta
    # The reference rounds each step to float32, and the published weights were trained with that.
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
    """Rotates the last `2 * len(freqs)` channels.

    Args:
      x: queries, keys or entries.
      positions: of the tokens; may be negative.
      freqs: from `frequencies`. With float64, the error of the angles is at most 5e-7 at every position. With float32,
        the angles are float32 products with the positions, with a relative error of up to 2^-24.

    Returns:
      In x's dtype.

    Raises:
      ValueError: x has fewer channels than `2 * len(freqs)`, or positions are not int32.
    """
    rope_width = 2 * len(freqs)
    if rope_width > x.shape[-1]:
        raise ValueError(f"rope_width={rope_width}: must be at most the head's width, {x.shape[-1]}")
    if positions.dtype != jnp.int32:
        raise ValueError(f"positions: {positions.dtype}, must be int32")
    angle_function = _angles if freqs.dtype == np.float64 else _rounded_angles
    angles = angle_function(positions[..., None], freqs.repeat(2)[None, None])
    angles = angles.reshape(*positions.shape, *(1,) * (x.ndim - 3), rope_width)
    unrotated, pairs = jnp.split(x, [x.shape[-1] - rope_width], axis=-1)
    pairs = pairs.astype(jnp.float32)
    rotated = pairs * jnp.cos(angles) + _quarter_turn(pairs) * jnp.sin(angles)
    return jnp.concatenate([unrotated, rotated.astype(x.dtype)], axis=-1)


def rotate_back(
    x: Float[Arrays, "B S *heads D"], positions: Int32[Arrays, "B S"], freqs: Frequencies
) -> Float[Array, "B S *heads D"]:
    """The inverse of `rotate`."""
    return rotate(x, -positions, freqs)


_TURN = fractions.Fraction("6.28318530717958647692528676655900576839433879875021")  # in radians


def _angles(
    positions: Int32[Arrays, "B S 1"], freqs: Float64[np.ndarray, "1 1 channels"]
) -> Float32[Array, "B S channels"]:
    """`positions * freqs`, modulo a turn, in radians from -pi to pi.

    A frequency is an integer number of 2^-64 turns, in a high and a low word of 32 bits. The high word of its product
    with the position, modulo a turn, has an error of less than 2^-31 turns, or 3e-9 radians.
    """
    steps = [round(fractions.Fraction(freq) / _TURN * 2**64) % 2**64 for freq in freqs.flat]
    high, low = (
        np.array(words, np.uint32).reshape(freqs.shape)
        for words in zip(*(divmod(s, 2**32) for s in steps), strict=True)
    )
    # The absolute value of the smallest int32 wraps to itself, which as uint32 is right.
    distance = jnp.abs(positions).astype(jnp.uint32)
    phase = distance * high + _high_word(distance, low)
    signed = jax.lax.bitcast_convert_type(phase, jnp.int32)  # from -1/2 to 1/2 turns
    radians = signed.astype(jnp.float32) * np.float32(2 * math.pi / 2**32)
    return jnp.where(positions < 0, -radians, radians)


def _high_word(a: UInt32[Array, "B S 1"], b: UInt32[np.ndarray, "1 1 channels"]) -> UInt32[Array, "B S channels"]:
    """The upper 32 bits of the 64-bit product, computed in uint32."""
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    middle = a_high * b_low + (a_low * b_low >> half)
    carried = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (carried >> half)


def _rounded_angles(
    positions: Int32[Arrays, "B S 1"], freqs: Float32[np.ndarray, "1 1 channels"]
) -> Float32[Array, "B S channels"]:
    """`positions * freqs` in float32, as the published weights were trained with."""
    return positions.astype(jnp.float32) * freqs


def _quarter_turn(x: Float32[Array, "*rows channels"]) -> Float32[Array, "*rows channels"]:
    """Maps each pair of channels (a, b) to (-b, a).

    An exact product with a matrix of 0 and +-1. With slices of every second channel instead, the TPU compiler takes
    three times as long for the whole layer (LOG.md).
    """
    matrix = np.kron(np.eye(x.shape[-1] // 2, dtype=np.float32), np.array([[0, 1], [-1, 0]], np.float32))
    return product("...i,io->...o", x, matrix)


def _yarn_kept(rope: Rope, theta: float, rope_width: int, real: type) -> Frequencies:
    """The weights of the original frequencies in YaRN: 1 for fast pairs, 0 for slow ones, with a linear ramp between.

    Whether a pair is fast or slow depends on its turns within the original length (Peng et al. 2023, "NTK-by-parts").
    The ends of the ramp are rounded outwards to whole pairs.
    """

    def pair_with_turns(turns: float) -> float:
        return rope_width * math.log(rope.yarn_original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with_turns(rope.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(rope.yarn_beta_slow)), rope_width - 1)
    ramp = (np.arange(rope_width // 2, dtype=real) - low) / real(max(high - low, 1e-3))
    return 1 - np.clip(ramp, 0, 1)
