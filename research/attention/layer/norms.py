"""RMS norm, computed in float32."""

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def normalize(x: Float[Array, "*rows channels"], eps: float) -> Float[Array, "*rows channels"]:
    """Divides each row by its root mean square, in float32. The result has x's dtype."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class RMSNorm(hk.RMSNorm):
    """RMS norm over the last axis, computed in float32 for every dtype of the input.

    The parameter `scale` is float32 and initialised to 1. With `create_scale=False` there is none.
    """

    def __init__(self, eps: float, *, create_scale: bool = True, name: str | None = None) -> None:
        super().__init__(axis=-1, eps=eps, create_scale=create_scale, name=name)

    def __call__(self, x: Float[Array, "*rows channels"]) -> Float[Array, "*rows channels"]:
        """Normalises. The result has x's dtype."""
        return super().__call__(x.astype(jnp.float32)).astype(x.dtype)
