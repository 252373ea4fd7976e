"""Products of matrices: all of this package are made here, so that float32 means float32 on every platform.

Left to JAX's default, a TPU rounds float32 operands to bfloat16 first, and a GPU to TF32; a CPU does neither.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32


def precision(*dtypes: Any) -> jax.lax.Precision:
    """HIGHEST where an operand is float32. Of bfloat16 operands every product is exact, and DEFAULT adds in float32."""
    return jax.lax.Precision.HIGHEST if jnp.float32 in map(jnp.dtype, dtypes) else jax.lax.Precision.DEFAULT


def precision_name(dtype: Any) -> str:
    """`precision` of operands of that dtype as effective settings record it: 'highest' or 'default'."""
    return precision(dtype).name.lower()


def product(
    equation: str, a: Float[Array, "..."], b: Float[Array | np.ndarray, "..."], out_dtype: Any = None
) -> Float[Array, "..."]:
    """`jnp.einsum(equation, a, b)`, its gradients too in the `precision` of a and b.

    The product accumulates into `out_dtype`, by default that of the operands.
    """
    return jnp.einsum(equation, a, b, precision=precision(a.dtype, b.dtype), preferred_element_type=out_dtype)


def contract(a: Float[Array, "_ _"], b: Float[Array, "_ _"], axes: tuple[int, int]) -> Float32[Array, "_ _"]:
    """Product of two matrices over an axis of each: what a Pallas kernel can do, which knows no `einsum`."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    exact = precision(a.dtype, b.dtype)
    return jax.lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)
