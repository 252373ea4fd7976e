"""Losses of a model of the next byte, or of an answer; see `research.data`."""

import math

import jax
import jax.numpy as jnp
import optax

from research.data.packing import NO_TARGET
from research.metrics import Mean


def cross_entropy(logits: jax.Array, targets: jax.Array, segments: jax.Array) -> Mean:
    """Cross-entropy of the real tokens, those of a document that have a target.

    Args:
      logits: [B, S, V], any float dtype; computed in float32.
      targets: int32 [B, S], the token that follows, or `NO_TARGET`; its value at padding does not matter.
      segments: int32 [B, S], >= 0 for a document, -1 for padding.

    Returns:
      Their sum in nats, float32 [], exactly 0 where no token is real; and the number of real tokens, int32 [].
    """
    real = (segments >= 0) & (targets != NO_TARGET)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return Mean(jnp.where(real, losses, 0.0).sum(), real.sum())


def bits_per_byte(nats: float) -> float:
    """Cross-entropy in bits per byte: tokens are bytes, so only the unit of the logarithm changes."""
    return nats / math.log(2)
