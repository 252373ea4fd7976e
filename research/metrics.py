"""Means that can be taken in parts. A leaf."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Mean(NamedTuple):
    """A mean that can be taken over several layers, batches and devices: float32 [] sum, and int32 [] of how many."""

    total: jax.Array
    count: jax.Array

    def mean(self) -> jax.Array:
        """float32 []; 0 over nothing."""
        return self.total / jnp.maximum(self.count, 1)
