"""Lengths that blocks divide, and arrays brought to them."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def round_up(length: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def pad(x: Shaped[Array, "..."], axis: int, before: int, after: int, value: float = 0) -> Shaped[Array, "..."]:
    """`x` with so many entries of that value at both ends of an axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (before, after)
    return jnp.pad(x, widths, constant_values=value)
