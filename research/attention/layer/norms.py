"""RMS norm in float32, for the attention layer and the model."""

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def normalize(x: Float[Array, "*rows width"], eps: float) -> Float[Array, "*rows width"]:
    """Each row over its root mean square, in float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class RMSNorm(hk.RMSNorm):
    """Divides the last axis by its root mean square, in float32 whatever the input's dtype.

    The parameter `scale` is float32 and starts at 1; `create_scale=False` leaves it out.
    """

    def __init__(self, eps: float, *, create_scale: bool = True, name: str | None = None) -> None:
        super().__init__(axis=-1, eps=eps, create_scale=create_scale, name=name)

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Normalises; the result has x's dtype."""
        return super().__call__(x.astype(jnp.float32)).astype(x.dtype)
