"""Rounding of lengths to multiples of a block size, and padding of arrays."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def pad(x: Shaped[Array, "..."], axis: int, before: int, after: int, value: float = 0) -> Shaped[Array, "..."]:
    """Pads `axis` with `value`, by `before` at its start and by `after` at its end."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (before, after)
    return jnp.pad(x, widths, constant_values=value)
