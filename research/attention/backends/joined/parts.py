"""What a flash attention of one part is given, whatever computes it: queries, keys and who sees what.

Of N sequences of T queries and K keys: q, out and d_out are [N, T, H, D], log-sum-exps [N, T, H], keys [N, K, D]. These
letters do not stand in the annotations, for a sequence here is often a block of one in the caller's arrays.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Float32, Int32

# Of the log-sum-exp of a query that sees no key. Finite: infinities become NaN where they are subtracted.
NOTHING = -1e30


class Ranges(NamedTuple):
    """The keys that each query sees: from `first` to before `end`, [N, T]."""

    first: Int32[Array, "_ _"]
    end: Int32[Array, "_ _"]


class Part(NamedTuple):
    """N sequences of T queries, each with its own K keys, which are also the values and shared by the heads.

    `seen` is [N, T, K], or ranges.
    """

    q: Float[Array, "_ _ _ D"]
    keys: Float[Array, "_ _ D"]
    seen: Ranges | Bool[Array, "_ _ _"]


class Softmax(NamedTuple):
    """Of the keys of a part alone: the output, and the log-sum-exp, `NOTHING` where no key is seen."""

    out: Float[Array, "_ _ _ D"]
    logsumexp: Float32[Array, "_ _ _"]


class Joint(NamedTuple):
    """What the gradient of a part is computed from: the output and log-sum-exp over all keys, and the cotangent.

    The log-sum-exp is `-NOTHING` where no key is seen, so that all weights are 0.
    """

    out: Float[Array, "_ _ _ D"]
    logsumexp: Float32[Array, "_ _ _"]
    d_out: Float[Array, "_ _ _ D"]


class Gradients(NamedTuple):
    """The share of a part in the gradients."""

    d_q: Float[Array, "_ _ _ D"]
    d_keys: Float[Array, "_ _ D"]
