"""Which experts a token is given to, and with which weights; how their loads are kept even.

Scores are `sqrt(softplus(x @ W))`, in float32 for every dtype. In the first `experts.hash_layers` layers a table gives
each token id its K experts; in the others a token has those with the highest score plus balance, a number per expert
that only chooses. In both, weights are the scores of the chosen, normalised to sum to `experts.scale`. Source:
DeepSeek-V4 as Hugging Face transformers 5.24 computes it (`DeepseekV4TopKRouter`, `DeepseekV4HashRouter`); float32 as
in DeepSeek's own code.

No token is ever dropped: with a limit to an expert's tokens, what a token gets would depend on later ones and on other
documents.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from research.attention.layer.linear import weight
from research.attention.product import product
from research.metrics import Mean
from research.settings.model import Experts

BALANCE, TABLE = UNTRAINED = ("balance", "table")  # parameters that no gradient trains
_LEAST_LOGIT = -80.0  # below, softplus is 0 in float32, and the gradient of its root infinite


class Routing(NamedTuple):
    """The experts of each token. Padding has the expert X, which does not exist, with weight 0."""

    ids: Int32[Array, "T K"]
    weights: Float32[Array, "T K"]


class Router(hk.Module):
    """Gives tokens to experts."""

    def __init__(self, settings: Experts, vocab_size: int, *, by_table: bool, name: str = "router") -> None:
        """Initializes the module.

        Args:
          settings: of the experts.
          vocab_size: number of token ids.
          by_table: whether the experts of a token depend on its id alone.
          name: the module's name.
        """
        super().__init__(name=name)
        self.settings, self.vocab_size, self.by_table = settings, vocab_size, by_table

    def __call__(
        self, x: Float[Array, "T E"], tokens: Int32[Array, " T"], real: Bool[Array, " T"]
    ) -> tuple[Routing, Float32[Array, "T X"]]:
        """Routes.

        Args:
          x: normalised hidden states.
          tokens: their ids; of padding any.
          real: which are no padding.

        Returns:
          The routing, and all scores.
        """
        experts, chosen = self.settings.count, self.settings.per_token
        logits = product("ti,io->to", x.astype(jnp.float32), weight("scores", (x.shape[-1], experts)))
        scores = jnp.sqrt(jax.nn.softplus(jnp.maximum(logits, _LEAST_LOGIT)))
        if self.by_table:
            ids = hk.get_parameter(TABLE, [self.vocab_size, chosen], jnp.int32, _balanced_table(experts))[tokens]
        else:
            balance = hk.get_parameter(BALANCE, [experts], jnp.float32, jnp.zeros)
            ids = jax.lax.top_k(jax.lax.stop_gradient(scores) + balance[None], chosen)[1]
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        weights *= self.settings.scale / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        real = real[:, None]
        return Routing(jnp.where(real, ids, experts), jnp.where(real, weights, 0.0)), scores


def loads(ids: Int32[Array, "T K"], experts: int) -> Int32[Array, " X"]:
    """How many tokens each expert has."""
    return jnp.zeros(experts, jnp.int32).at[ids.reshape(-1)].add(1, mode="drop")


def balance_loss(scores: Float32[Array, "B S X"], ids: Int32[Array, "B S K"], segments: Int32[Array, "B S"]) -> Mean:
    """The sequence-wise balance loss (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20) of each document, summed.

    Of a document of T tokens it is the sum over experts of f * P, where f is X / (K T) times the number of its tokens
    that chose the expert, and P the mean over its tokens of the expert's share in their scores; 1 if all is even.

    Args:
      scores: of the router.
      ids: of its routing.
      segments: documents' ids, below S, and -1 for padding.

    Returns:
      The sum over documents, and their number.
    """
    seq_len, experts, chosen = *scores.shape[1:], ids.shape[-1]
    rows = jnp.arange(len(ids), dtype=jnp.int32)[:, None]
    # Sums of integers, in which the order of addition does not show, are all that is scattered.
    counts = jnp.zeros((len(ids), seq_len, experts), jnp.int32)
    counts = counts.at[rows[..., None], segments[..., None], ids].add(1, mode="drop")
    lengths = jnp.zeros((len(ids), seq_len), jnp.int32).at[rows, segments].add(segments >= 0)
    share = scores / (scores.sum(axis=-1, keepdims=True) + 1e-20)
    length = lengths[rows, segments].astype(jnp.float32)
    even = chosen / experts * jnp.maximum(length, 1.0) ** 2
    terms = (share * counts[rows, segments]).sum(axis=-1) / even
    return Mean(jnp.where(segments >= 0, terms, 0.0).sum(), (lengths > 0).sum())


def _balanced_table(experts: int) -> hk.initializers.Initializer:
    """Draws a table in which each expert has as many token ids as any other, give or take one, and no id has one twice.

    Token ids in random order take turns through the experts in random order. How the published tables were drawn is not
    known.
    """

    def draw(shape: Sequence[int], dtype: Any) -> Int32[Array, "V K"]:
        size, chosen = shape
        rank = jax.random.permutation(hk.next_rng_key(), size).astype(dtype)
        order = jax.random.permutation(hk.next_rng_key(), experts).astype(dtype)
        # Modulo first: the product of two large numbers would not fit.
        return order[(rank[:, None] % experts * chosen + jnp.arange(chosen, dtype=dtype)[None]) % experts]

    return draw
