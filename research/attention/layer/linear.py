"""Linear layers without biases, with float32 parameters and products in the input's dtype."""

from typing import Any

import haiku as hk
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from research.attention.product import product

INIT_STD = 0.02  # DeepSeek's initializer_range


def weight(name: str, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """The parameter `name` of the calling module, initialised from a normal with standard deviation `INIT_STD`."""
    return hk.get_parameter(name, shape, jnp.float32, hk.initializers.RandomNormal(INIT_STD))


def project(
    name: str, x: Float[Array, "*rows inputs"], width: int, out_dtype: Any = None
) -> Float[Array, "*rows outputs"]:
    """`x @ w`, where w is the parameter `name` and has `width` outputs.

    The product is accumulated in `out_dtype`, by default x's dtype, which is that of the result.
    """
    w = weight(name, (x.shape[-1], width))
    return product("...i,io->...o", x, w.astype(x.dtype), out_dtype)
