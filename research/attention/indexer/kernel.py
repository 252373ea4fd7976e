"""The indexer's scores as a Pallas kernel for TPUs.

XLA accumulates the heads in HBM: with 64 heads, each block of scores is read and written 64 times. In this kernel a
block stays in vector memory until all heads are added. The backward kernel recomputes the products of q and keys, whose
signs are the gradients of the relus.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from research.attention.product import contract

Ref = Any  # a block of an array in a core's memory
Residuals = tuple[Float[Array, "B S I W"], Float[Array, "B C W"], Float32[Array, "B S I"]]

_BLOCK_Q = 128
# The kernels accumulate over the last axis of their grids.
_ORDER = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def scores(
    heads_at_once: int,
    entries_at_once: int,
    interpret: bool,
    q: Float[Array, "B S I W"],
    keys: Float[Array, "B C W"],
    weights: Float32[Array, "B S I"],
) -> Float32[Array, "B S C"]:
    """`sum_i weights_i * relu(q_i . key)`.

    Args:
      heads_at_once: index heads of a grid step, a divisor of I.
      entries_at_once: entries of a grid step, a divisor of C, and a multiple of 128 or C itself.
      interpret: whether to interpret the kernel, as is necessary without a TPU.
      q: index queries.
      keys: index keys, of entries.
      weights: weights of the index heads.
    """
    seq_len = q.shape[1]
    grid, q, weights, specs = _plan(heads_at_once, entries_at_once, q, keys, weights)
    batch, blocks_q, groups, blocks_kv = grid

    out = pl.pallas_call(
        _forward,
        # Heads are the last axis: a block of scores is complete before the next one begins.
        grid=(batch, blocks_q, blocks_kv, groups),
        in_specs=[_heads_last(specs[name]) for name in ("q", "keys", "weights")],
        out_specs=_heads_last(specs["scores"]),
        out_shape=jax.ShapeDtypeStruct((batch, q.shape[2], keys.shape[1]), jnp.float32),
        compiler_params=_ORDER,
        interpret=interpret,
        name="index_scores",
    )(q, keys, weights)
    return out[:, :seq_len]


def _scores_forward(
    heads_at_once: int,
    entries_at_once: int,
    interpret: bool,
    q: Float[Array, "B S I W"],
    keys: Float[Array, "B C W"],
    weights: Float32[Array, "B S I"],
) -> tuple[Float32[Array, "B S C"], Residuals]:
    return scores(heads_at_once, entries_at_once, interpret, q, keys, weights), (q, keys, weights)


def _scores_backward(
    heads_at_once: int,
    entries_at_once: int,
    interpret: bool,
    residuals: Residuals,
    d_scores: Float32[Array, "B S C"],
) -> tuple[Float[Array, "B S I W"], Float[Array, "B C W"], Float32[Array, "B S I"]]:
    q, keys, weights = residuals
    batch, seq_len, heads, width = q.shape
    grid, q, weights, specs = _plan(heads_at_once, entries_at_once, q, keys, weights)
    _, blocks_q, groups, _ = grid
    d_scores = jnp.pad(d_scores, ((0, 0), (0, q.shape[2] - seq_len), (0, 0)))

    # Entries are the last axis: the gradients of a block of queries are complete before the next heads begin. The
    # gradients of keys are not; each step writes its own part, and the parts are added afterwards.
    d_keys_part = pl.BlockSpec((1, 1, 1, entries_at_once, width), lambda b, s, h, c: (s, h, b, c, 0))
    d_q, d_weights, d_keys = pl.pallas_call(
        _backward,
        grid=grid,
        in_specs=[specs[name] for name in ("q", "keys", "weights", "scores")],
        out_specs=[specs["q"], specs["weights"], d_keys_part],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            jax.ShapeDtypeStruct(weights.shape, jnp.float32),
            jax.ShapeDtypeStruct((blocks_q, groups, *keys.shape), jnp.float32),
        ],
        compiler_params=_ORDER,
        interpret=interpret,
        name="index_scores_backward",
    )(q, keys, weights, d_scores)
    d_q = jnp.moveaxis(d_q, 1, 2)[:, :seq_len].astype(q.dtype)
    d_weights = jnp.moveaxis(d_weights, 1, 2).reshape(batch, -1, heads)[:, :seq_len]
    return d_q, d_keys.sum(axis=(0, 1)).astype(keys.dtype), d_weights


scores.defvjp(_scores_forward, _scores_backward)


def _forward(q: Ref, keys: Ref, weights: Ref, scores: Ref) -> None:
    """A grid step of the forward kernel."""

    @pl.when(pl.program_id(3) == 0)
    def _() -> None:
        scores[...] = jnp.zeros_like(scores)

    total = scores[0]
    for head in range(q.shape[1]):
        total += jnp.maximum(contract(q[0, head], keys[0], (1, 1)), 0.0) * weights[0, 0, :, head : head + 1]
    scores[0] = total


def _backward(q: Ref, keys: Ref, weights: Ref, d_scores: Ref, d_q: Ref, d_weights: Ref, d_keys: Ref) -> None:
    """A grid step of the backward kernel."""

    @pl.when(pl.program_id(3) == 0)
    def _() -> None:
        d_q[...] = jnp.zeros_like(d_q)
        d_weights[...] = jnp.zeros_like(d_weights)

    key_sum = jnp.zeros(d_keys.shape[-2:], jnp.float32)
    for head in range(q.shape[1]):
        dots = contract(q[0, head], keys[0], (1, 1))
        d_relu = jnp.where(dots > 0, d_scores[0], 0.0)
        d_weights[0, 0, :, head : head + 1] += jnp.sum(d_relu * dots, axis=1, keepdims=True)
        d_dots = (d_relu * weights[0, 0, :, head : head + 1]).astype(keys.dtype)
        d_q[0, head] += contract(d_dots, keys[0], (1, 0))
        key_sum += contract(d_dots, q[0, head], (0, 0))
    d_keys[0, 0, 0] = key_sum


def _plan(
    heads_at_once: int,
    entries_at_once: int,
    q: Float[Array, "B S I W"],
    keys: Float[Array, "B C W"],
    weights: Float32[Array, "B S I"],
) -> tuple[
    tuple[int, ...],
    Float[Array, "B I padded W"],
    Float32[Array, "B groups padded heads_at_once"],
    dict[str, pl.BlockSpec],
]:
    """The grid over (sequences, queries, heads, entries), q and weights in the kernels' layout, and the block specs."""
    batch, seq_len, heads, width = q.shape
    for name, size, length in (("heads", heads_at_once, heads), ("entries", entries_at_once, keys.shape[1])):
        if length % size:  # the grid would leave out the remainder
            raise ValueError(f"{name}_at_once={size}: must be a divisor of {length}")
    block_q = min(_BLOCK_Q, seq_len)
    padding = -seq_len % block_q
    groups, blocks_q = heads // heads_at_once, math.ceil(seq_len / block_q)
    q = jnp.pad(jnp.moveaxis(q, 2, 1), ((0, 0), (0, 0), (0, padding), (0, 0)))
    weights = jnp.pad(weights, ((0, 0), (0, padding), (0, 0)))
    weights = jnp.moveaxis(weights.reshape(batch, -1, groups, heads_at_once), 2, 1)
    specs = {
        "q": pl.BlockSpec((1, heads_at_once, block_q, width), lambda b, s, h, c: (b, h, s, 0)),
        "keys": pl.BlockSpec((1, entries_at_once, width), lambda b, s, h, c: (b, c, 0)),
        "weights": pl.BlockSpec((1, 1, block_q, heads_at_once), lambda b, s, h, c: (b, h, s, 0)),
        "scores": pl.BlockSpec((1, block_q, entries_at_once), lambda b, s, h, c: (b, s, c)),
    }
    return (batch, blocks_q, groups, keys.shape[1] // entries_at_once), q, weights, specs


def _heads_last(spec: pl.BlockSpec) -> pl.BlockSpec:
    """The block spec for a grid whose last axes are (entries, heads) instead of (heads, entries)."""
    return pl.BlockSpec(spec.block_shape, lambda b, s, c, h: spec.index_map(b, s, h, c))
