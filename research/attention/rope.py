"""Rotary position embedding on the trailing channels of a head, in interleaved pairs, in float32.

Channels `2i` and `2i + 1` of the trailing `rope_width` are a plane that turns by `position * frequency[i]`.
Keys serve as values, so an attention output carries the rotation of what it attended to: `rotate_back` undoes it
at the query's position, and what remains depends on relative positions alone. Source: DeepSeek-V4, section 2.3.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from research.attention.product import product
from research.attention.spec import RopeSpec


def frequencies(rope: RopeSpec, rope_width: int, *, compressed: bool) -> np.ndarray:
    """Radians per position of each channel pair.

    Args:
      rope: thetas and YaRN settings.
      rope_width: rotated channels, even.
      compressed: whether the layer is a CSA or HCA one: they have a theta of their own, and they alone have YaRN.

    Returns:
      float32 [rope_width // 2].

    Raises:
      ValueError: rope_width is not a positive even number.
    """
    if rope_width <= 0 or rope_width % 2:
        raise ValueError(f"rope_width={rope_width}: must be a positive even number")
    theta = rope.compressed_theta if compressed else rope.theta
    # float32 step by step, as published weights were trained: distance multiplies every differing ulp.
    exponents = np.arange(0, rope_width, 2, dtype=np.float32) / np.float32(rope_width)
    plain = np.float32(1) / np.float32(theta) ** exponents
    if not compressed or rope.yarn_factor == 1:
        return plain
    kept = _yarn_kept(rope, theta, rope_width)
    return plain / np.float32(rope.yarn_factor) * (1 - kept) + plain * kept


def rotate(x: jax.Array, positions: jax.Array, freqs: np.ndarray) -> jax.Array:
    """Turns the trailing `2 * len(freqs)` channels by their positions.

    Args:
      x: [B, S, ..., D].
      positions: int32 [B, S].
      freqs: float32, from `frequencies`.

    Returns:
      As x, in x's dtype.

    Raises:
      ValueError: x has fewer channels than are to be rotated.
    """
    rope_width = 2 * len(freqs)
    if rope_width > x.shape[-1]:
        raise ValueError(f"rope_width={rope_width}: must be at most the head's width, {x.shape[-1]}")
    angles = positions.astype(jnp.float32)[..., None] * freqs.repeat(2)[None, None]
    angles = angles.reshape(*positions.shape, *(1,) * (x.ndim - 3), rope_width)
    still, turning = jnp.split(x, [x.shape[-1] - rope_width], axis=-1)
    turning = turning.astype(jnp.float32)
    turned = turning * jnp.cos(angles) + _quarter_turn(turning) * jnp.sin(angles)
    return jnp.concatenate([still, turned.astype(x.dtype)], axis=-1)


def rotate_back(x: jax.Array, positions: jax.Array, freqs: np.ndarray) -> jax.Array:
    """The inverse of `rotate`."""
    return rotate(x, -positions, freqs)


def _quarter_turn(x: jax.Array) -> jax.Array:
    """Each pair of channels (a, b) to (-b, a), float32.

    As an exact product with a matrix of 0 and +-1: a TPU's compiler takes three times as long over the whole layer
    where every second channel is sliced out instead (LOG.md).
    """
    matrix = np.kron(np.eye(x.shape[-1] // 2, dtype=np.float32), np.array([[0, 1], [-1, 0]], np.float32))
    return product("...i,io->...o", x, matrix)


def _yarn_kept(rope: RopeSpec, theta: float, rope_width: int) -> np.ndarray:
    """How much of each pair's own frequency YaRN keeps: 1 for the fast pairs, 0 for the slow, a ramp between.

    A pair is fast or slow by its turns within the original length (Peng et al. 2023, "NTK-by-parts"); the ramp's
    ends are rounded outwards to whole pairs.
    """

    def pair_with_turns(turns: float) -> float:
        return rope_width * math.log(rope.yarn_original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with_turns(rope.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(rope.yarn_beta_slow)), rope_width - 1)
    ramp = (np.arange(rope_width // 2, dtype=np.float32) - low) / np.float32(max(high - low, 1e-3))
    return 1 - np.clip(ramp, 0, 1)
