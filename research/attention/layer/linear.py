"""Weights without biases: float32 parameters of the calling module, multiplied in the input's dtype."""

from typing import Any

import haiku as hk
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from research.attention.product import product

INIT_STD = 0.02  # DeepSeek's initializer_range


def weight(name: str, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """The parameter `name` of the calling module, drawn from a normal of deviation `INIT_STD`."""
    return hk.get_parameter(name, shape, jnp.float32, hk.initializers.RandomNormal(INIT_STD))


def project(name: str, x: Float[Array, "*rows in"], width: int, out_dtype: Any = None) -> Float[Array, "*rows out"]:
    """`x @ w`, where w [in, width] is the parameter `name`.

    The product accumulates into `out_dtype`, by default x's dtype.
    """
    w = weight(name, (x.shape[-1], width))
    return product("...i,io->...o", x, w.astype(x.dtype), out_dtype)
