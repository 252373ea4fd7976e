"""SwiGLU with limits, as all feed-forward layers compute it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(gate: Float[Array, "*rows I"], up: Float[Array, "*rows I"], limit: float) -> Float[Array, "*rows I"]:
    """`silu(gate) * up`, with gate at most `limit` and up from -limit to it; 0 is no limit.

    At a limit the gradient is that of what is within. Source: DeepSeek-V4's `swiglu_limit`, as Hugging Face
    transformers 5.24 computes it (`DeepseekV4MLP`).
    """
    if limit:  # by selections: the gradient of a minimum would be halved where both are equal
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
    return jax.nn.silu(gate) * up
