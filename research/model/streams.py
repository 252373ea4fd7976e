"""Hyper-connections: several copies of the residual stream, which every sublayer reads, writes and mixes.

Of the N streams `h[i]` of a token, a sublayer F makes

    x = sum_i pre[i] h[i]                          what F is applied to
    h'[j] = post[j] F(x) + sum_i comb[i, j] h[i]   the streams after it

where pre, post and comb are functions of all streams of the token, and comb is nearly doubly stochastic. Source:
manifold-constrained hyper-connections (arXiv 2512.24880), in the form of DeepSeek-V4's published weights as Hugging
Face transformers 5.24 computes it (`DeepseekV4HyperConnection`, `DeepseekV4HyperHead`).

Gates and sums are float32 for every dtype of the streams, as in DeepSeek's own code; only the results are rounded.
"""

from collections.abc import Callable
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from research.attention.layer.linear import weight
from research.attention.product import product
from research.metrics import Mean
from research.settings.model import Model

# Of the gates at the start, so that comb is nearly uniform and the streams nearly one residual network (the paper's
# gating factor).
_START = 0.01


class Connection(NamedTuple):
    """One sublayer's: `x` is its input, `mix` makes the next streams of its output, `comb` is the mixing matrix."""

    x: Float[Array, "B S E"]
    mix: Callable[[Float[Array, "B S E"]], Float[Array, "B S *streams E"]]
    comb: Float32[Array, "B S N N"] | None


def sinkhorn(logits: Float32[Array, "*rows N N"], rounds: int, eps: float) -> Float32[Array, "*rows N N"]:
    """Makes matrices nearly doubly stochastic: columns sum to 1, rows the more nearly the more rounds.

    A softmax of each row, then columns divided by their sums, then `rounds - 1` times rows and columns; `eps` is added
    to the softmax and to every sum. Computed again in the backward pass, whose input is small.
    """

    def divided(matrix: Array, axis: int) -> Array:
        return matrix / (matrix.sum(axis=axis, keepdims=True) + eps)

    @jax.checkpoint
    def balanced(logits: Array) -> Array:
        first = divided(jax.nn.softmax(logits, axis=-1) + eps, -2)
        # A loop takes a third of the time to compile that its rounds written out do.
        return jax.lax.scan(lambda m, _: (divided(divided(m, -1), -2), None), first, length=rounds - 1)[0]

    return balanced(logits)


class HyperConnection(hk.Module):
    """Connects one sublayer to the streams."""

    def __init__(self, settings: Model, name: str) -> None:
        super().__init__(name=name)
        self.settings = settings

    def __call__(self, streams: Float[Array, "B S N E"]) -> Connection:
        """Computes the gates of every token."""
        settings, count = self.settings, streams.shape[2]
        pre, post, comb = _gates(streams, settings.norm_eps, (count, count, count * count))
        comb = comb.reshape(*comb.shape[:2], count, count)
        comb = sinkhorn(comb, settings.sinkhorn_rounds, settings.streams_eps)
        post = 2 * jax.nn.sigmoid(post)

        def mix(out: Float[Array, "B S E"]) -> Float[Array, "B S N E"]:
            mixed = product("bsij,bsie->bsje", comb, streams.astype(jnp.float32))
            return (post[..., None] * out.astype(jnp.float32)[:, :, None] + mixed).astype(streams.dtype)

        return Connection(_read(pre, streams, settings.streams_eps), mix, comb)


class Collapse(hk.Module):
    """Makes one hidden state of the streams, at the end of the model."""

    def __init__(self, settings: Model, name: str = "collapse") -> None:
        super().__init__(name=name)
        self.settings = settings

    def __call__(self, streams: Float[Array, "B S N E"]) -> Float[Array, "B S E"]:
        """Returns their gated sum, in their dtype."""
        (pre,) = _gates(streams, self.settings.norm_eps, (streams.shape[2],))
        return _read(pre, streams, self.settings.streams_eps)


def row_error(comb: Float32[Array, "B S N N"], segments: Int32[Array, "B S"]) -> Mean:
    """How far a row of comb is from summing to 1, the furthest one of each real token; columns always do."""
    return _over_real(jnp.abs(comb.sum(axis=-1) - 1).max(axis=-1), segments)


def gain(start: Float[Array, "B S N E"], end: Float[Array, "B S N E"], segments: Int32[Array, "B S"]) -> Mean:
    """The root mean square of a real token's streams at the end, by that at the start."""

    def size(streams: Float[Array, "B S N E"]) -> Float32[Array, "B S"]:
        return jnp.sqrt(jnp.mean(jnp.square(streams.astype(jnp.float32)), axis=(2, 3)))

    start, end = jax.lax.stop_gradient((start, end))
    return _over_real(size(end) / jnp.maximum(size(start), 1e-20), segments)


def _over_real(values: Float32[Array, "B S"], segments: Int32[Array, "B S"]) -> Mean:
    real = segments >= 0
    return Mean(jnp.where(real, jax.lax.stop_gradient(values), 0.0).sum(), real.sum())


def _gates(streams: Float[Array, "B S N E"], eps: float, widths: tuple[int, ...]) -> list[Float32[Array, "B S _"]]:
    """Logits of gates of these widths: one scale each, of products with the normalised streams, and a bias.

    The streams of a token are normalised together, without a learned scale. Dividing the product by their root mean
    square is the same, and keeps no normalised copy of them.
    """
    flat = streams.astype(jnp.float32).reshape(*streams.shape[:2], -1)
    factor = jax.lax.rsqrt(jnp.mean(flat**2, axis=-1, keepdims=True) + eps)
    raw = factor * product("bsi,io->bso", flat, weight("gates", (flat.shape[-1], sum(widths))))
    scale = hk.get_parameter("scale", [len(widths)], jnp.float32, hk.initializers.Constant(_START))
    bias = hk.get_parameter("bias", [sum(widths)], jnp.float32, jnp.zeros)
    logits, start = [], 0
    for index, width in enumerate(widths):
        part = slice(start, start + width)
        logits.append(scale[index] * raw[..., part] + bias[None, None, part])
        start += width
    return logits


def _read(gates: Float32[Array, "B S N"], streams: Float[Array, "B S N E"], eps: float) -> Float[Array, "B S E"]:
    """The sum of the streams, each by the sigmoid of its gate and a little."""
    pre = jax.nn.sigmoid(gates) + eps
    return product("bsi,bsie->bse", pre, streams.astype(jnp.float32)).astype(streams.dtype)
