"""Matrix products in full float32 on every platform. All matrix products of this package are made here.

By default JAX rounds float32 operands to bfloat16 on a TPU and to TF32 on a GPU, but not on a CPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32


def precision(*dtypes: Any) -> jax.lax.Precision:
    """HIGHEST if an operand is float32, otherwise DEFAULT, which multiplies bfloat16 exactly and adds in float32."""
    return jax.lax.Precision.HIGHEST if jnp.float32 in map(jnp.dtype, dtypes) else jax.lax.Precision.DEFAULT


def precision_name(dtype: Any) -> str:
    """The name of the `precision` for operands of that dtype, in settings in effect: 'highest' or 'default'."""
    return precision(dtype).name.lower()


def product(
    equation: str, a: Float[Array, "..."], b: Float[Array | np.ndarray, "..."], out_dtype: Any = None
) -> Float[Array, "..."]:
    """`jnp.einsum(equation, a, b)` in the `precision` of a and b, and so are its gradients.

    The result has `out_dtype`, in which the product is accumulated; by default the dtype of the operands.
    """
    return jnp.einsum(equation, a, b, precision=precision(a.dtype, b.dtype), preferred_element_type=out_dtype)


def contract(a: Float[Array, "_ _"], b: Float[Array, "_ _"], axes: tuple[int, int]) -> Float32[Array, "_ _"]:
    """Product of two matrices over one axis of each, for Pallas kernels, which do not support `einsum`."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    exact = precision(a.dtype, b.dtype)
    return jax.lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)
