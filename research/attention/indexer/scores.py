"""The indexer's scores of entries, with two backends: XLA, and a Pallas kernel for TPUs."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from research.attention.indexer import kernel as index_kernel
from research.attention.padding import round_up
from research.attention.product import product
from research.hardware import LANES
from research.settings.attention import Attention

_DEFAULT_HEADS = {"xla": 1, "pallas": 8}
_DEFAULT_ENTRIES = {"xla": 0, "pallas": 512}


class Index(NamedTuple):
    """Queries, keys and head weights of the indexer."""

    q: Float[Array, "B S I W"]
    keys: Float[Array, "B C W"]
    weights: Float32[Array, "B S I"]


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How scores are computed. It does not change their values, except for rounding.

    Attributes:
      backend: 'xla' or 'pallas'.
      heads_at_once: number of index heads whose products exist at the same time, a divisor of I.
      entries_at_once: likewise of entries; 0 is all.
      interpreted: whether the Pallas kernel is interpreted, as is necessary without a TPU.
    """

    backend: str = "xla"
    heads_at_once: int = 1
    entries_at_once: int = 0
    interpreted: bool = False

    @classmethod
    def make(cls, settings: Attention, platform: str) -> "Scoring":
        """The scoring that `settings.index_...` select on a platform."""
        backend = settings.index_backend
        if backend == "auto":
            backend = "pallas" if platform == "tpu" else "xla"
        fitting = (size for size in range(_DEFAULT_HEADS[backend], 0, -1) if settings.index_heads % size == 0)
        return cls(
            backend,
            settings.index_heads_at_once or next(fitting),
            settings.index_entries_at_once or _DEFAULT_ENTRIES[backend],
            interpreted=backend == "pallas" and platform != "tpu",
        )


def index_scores(index: Index, scoring: Scoring) -> Float32[Array, "B S C"]:
    """`sum_i weights_i * relu(q_i . key) / sqrt(I * W)`.

    Computed for some heads and entries at a time, and recomputed in the backward pass. The products of all heads would
    take I times the memory of the result, and so would the residuals of the relus.
    """
    index = index._replace(weights=index.weights * (index.q.shape[2] * index.q.shape[3]) ** -0.5)
    entries = index.keys.shape[1]
    size = min(scoring.entries_at_once or entries, round_up(entries, LANES))
    if not entries or (scoring.backend == "xla" and entries <= size):
        return _all_entries(index, scoring.heads_at_once)
    padded = jnp.pad(index.keys, ((0, 0), (0, round_up(entries, size) - entries), (0, 0)))
    if scoring.backend == "pallas":
        options = scoring.heads_at_once, size, scoring.interpreted
        return index_kernel.scores(*options, *index._replace(keys=padded))[..., :entries]
    blocks = jnp.moveaxis(padded.reshape(len(padded), -1, size, padded.shape[2]), 1, 0)
    scores = jax.lax.map(lambda keys: _all_entries(index._replace(keys=keys), scoring.heads_at_once), blocks)
    return jnp.moveaxis(scores, 0, 2).reshape(*index.q.shape[:2], -1)[..., :entries]


def _all_entries(index: Index, heads_at_once: int) -> Float32[Array, "B S C"]:
    """Scores of all entries at once. The weights of the index are already scaled by 1 / sqrt(I * W)."""
    batch, seq_len, heads, width = index.q.shape

    @functools.partial(jax.checkpoint, prevent_cse=False)  # CSE does not cross a scan
    def add_heads(
        scores: Float32[Array, "B S C"],
        group: tuple[Float[Array, "B S heads_at_once W"], Float32[Array, "B S heads_at_once"]],
    ) -> tuple[Float32[Array, "B S C"], None]:
        q, weights = group
        dots = product("bsgd,bcd->bsgc", q, index.keys, jnp.float32)
        return scores + (jax.nn.relu(dots) * weights[..., None]).sum(axis=2), None

    zeros = jnp.zeros((batch, seq_len, index.keys.shape[1]), jnp.float32)
    groups = (batch, seq_len, heads // heads_at_once, heads_at_once)
    by_group = index.q.reshape(*groups, width), index.weights.reshape(groups)
    return jax.lax.scan(add_heads, zeros, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), by_group))[0]
