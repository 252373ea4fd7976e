"""The indexer's scores of queries against entries, and the two ways of computing them: XLA's, and a kernel for TPUs."""

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
    """What scores are made of, by I index heads."""

    q: Float[Array, "B S I W"]
    keys: Float[Array, "B C W"]
    weights: Float32[Array, "B S I"]


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How scores are computed; not what they are.

    Attributes:
      backend: 'xla', or 'pallas'.
      heads_at_once: index heads whose products exist at a time, a divisor of I.
      entries_at_once: entries likewise; 0 is all.
      interpreted: whether pallas's kernel is interpreted, as it must be where there is no TPU.
    """

    backend: str = "xla"
    heads_at_once: int = 1
    entries_at_once: int = 0
    interpreted: bool = False

    @classmethod
    def make(cls, settings: Attention, platform: str) -> "Scoring":
        """What takes effect of `settings.index_...` on a platform."""
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
    """`sum_i weights_i * relu(q_i . key) / sqrt(I * D)` over the I index heads.

    Some heads and entries at a time, recomputed in the backward pass: all heads at once would take I times the memory
    of the result, and so would the signs that each relu keeps for its gradient.
    """
    index = index._replace(weights=index.weights * (index.q.shape[2] * index.q.shape[3]) ** -0.5)
    entries = index.keys.shape[1]
    size = min(scoring.entries_at_once or entries, round_up(entries, LANES))
    if not entries or (scoring.backend == "xla" and entries <= size):
        return _all_entries(index, scoring.heads_at_once)
    padded = jnp.pad(index.keys, ((0, 0), (0, round_up(entries, size) - entries), (0, 0)))
    if scoring.backend == "pallas":
        asked = scoring.heads_at_once, size, scoring.interpreted
        return index_kernel.scores(*asked, *index._replace(keys=padded))[..., :entries]
    blocks = jnp.moveaxis(padded.reshape(len(padded), -1, size, padded.shape[2]), 1, 0)
    scores = jax.lax.map(lambda keys: _all_entries(index._replace(keys=keys), scoring.heads_at_once), blocks)
    return jnp.moveaxis(scores, 0, 2).reshape(*index.q.shape[:2], -1)[..., :entries]


def _all_entries(index: Index, heads_at_once: int) -> Float32[Array, "B S C"]:
    """Scores of all entries of an index whose weights are scaled."""
    batch, seq_len, heads, width = index.q.shape

    @functools.partial(jax.checkpoint, prevent_cse=False)  # within a scan nothing else would merge them
    def add_heads(scores: Float32[Array, "B S C"], group: tuple) -> tuple[Float32[Array, "B S C"], None]:
        q, weights = group
        dots = product("bsgd,bcd->bsgc", q, index.keys, jnp.float32)
        return scores + (jax.nn.relu(dots) * weights[..., None]).sum(axis=2), None

    nothing = jnp.zeros((batch, seq_len, index.keys.shape[1]), jnp.float32)
    groups = (batch, seq_len, heads // heads_at_once, heads_at_once)
    by_group = index.q.reshape(*groups, width), index.weights.reshape(groups)
    return jax.lax.scan(add_heads, nothing, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), by_group))[0]
