"""How large the arrays of a program are."""

import jax
from jax.extend.core import jaxprs_in_params


def largest_array(function, *arguments) -> int:
    """Elements of the largest array that the traced function makes, loops and calls included."""

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from sizes(inner)

    return max(sizes(jax.make_jaxpr(function)(*arguments).jaxpr))


def temp_bytes(function, *arguments) -> int:
    """What the compiler sets aside for a jitted function, beside its arguments and results."""
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
