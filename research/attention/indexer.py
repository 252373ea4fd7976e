"""The lightning indexer: scores every query against small compressed keys, and picks the entries that CSA sees."""

import functools
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from research.attention import rope, selection
from research.attention import visibility as visibility_lib
from research.attention.compressor import Compressor
from research.attention.linear import project


class Index(NamedTuple):
    """What scores are made of: queries [B, S, I, D], keys [B, C, D], and float32 weights [B, S, I] of I index heads."""

    q: jax.Array
    keys: jax.Array
    weights: jax.Array


class Indexer(hk.Module):
    """Projects the hidden states to queries, keys and weights (DeepSeek-V4, equations 13 to 16).

    Its inputs are detached: no gradient flows from it into the model.

    Attributes:
      ratio: tokens per entry.
      heads: index heads.
      width: channels of an index head.
      norm_eps: of the compressed keys' RMS norm.
      freqs: float32, from `rope.frequencies`.
    """

    def __init__(
        self, ratio: int, heads: int, width: int, *, norm_eps: float, freqs: np.ndarray, name: str = "indexer"
    ):
        super().__init__(name=name)
        self.ratio = ratio
        self.heads = heads
        self.width = width
        self.norm_eps = norm_eps
        self.freqs = freqs

    def __call__(self, x_BxSxE: jax.Array, low_rank_q: jax.Array, positions: jax.Array, segments: jax.Array) -> Index:
        """Projects.

        Args:
          x_BxSxE: hidden states.
          low_rank_q: [B, S, q_rank], the layer's normalised low-rank query.
          positions: int32 [B, S].
          segments: int32 [B, S].

        Returns:
          Queries and keys in the dtype of the inputs.
        """
        x_BxSxE, low_rank_q = jax.lax.stop_gradient((x_BxSxE, low_rank_q))
        batch, seq_len, _ = x_BxSxE.shape
        q = project("q_up", low_rank_q, self.heads * self.width).reshape(batch, seq_len, self.heads, self.width)
        q = rope.rotate(q, positions, self.freqs)
        compress = Compressor(self.ratio, self.width, overlap=True, norm_eps=self.norm_eps, freqs=self.freqs)
        keys = compress(x_BxSxE, positions, segments)
        return Index(q, keys, project("head_weights", x_BxSxE, self.heads, jnp.float32))


def index_scores(index: Index) -> jax.Array:
    """float32 [B, S, C]: `sum_i weights_i * relu(q_i . key) / sqrt(I * D)` over the I index heads.

    One head at a time, recomputed in the backward pass: all of them at once would take I times the memory of the
    result, and so would the signs that each relu keeps for its gradient.
    """
    batch, seq_len, heads, width = index.q.shape
    scale = width**-0.5 * heads**-0.5

    @functools.partial(jax.checkpoint, prevent_cse=False)  # within a scan nothing else would merge them
    def add_head(scores_BxSxC, head):
        q_BxSxD, weight_BxS = head
        dots = jnp.einsum(
            "bsd,bcd->bsc",
            q_BxSxD,
            index.keys,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return scores_BxSxC + jax.nn.relu(dots) * (weight_BxS * scale)[..., None], None

    nothing = jnp.zeros((batch, seq_len, index.keys.shape[1]), jnp.float32)
    by_head = (jnp.moveaxis(index.q, 2, 0), jnp.moveaxis(index.weights, 2, 0))
    return jax.lax.scan(add_head, nothing, by_head)[0]


def select(index: Index, visibility: visibility_lib.CompressedSparse, segments: jax.Array) -> jax.Array:
    """The `top_k` best scored of each query's visible entries (DeepSeek-V4, equation 17); no gradient flows through it.

    A block of queries at a time, so that of the scores no more than a block's exist.

    Args:
      index: from `Indexer`.
      visibility: who sees whom before the selection, and how many are selected.
      segments: int32 [B, S].

    Returns:
      bool [B, S, C]; as indices: `selection.indices`.
    """
    of_entry = visibility_lib.entry_segments(segments, visibility.ratio)
    t, blocks = selection.query_blocks((index.q, index.weights, segments), (0, 0.0, visibility_lib.PADDING))

    def of_block(block):
        t, (q, weights, segments) = block
        visible = selection.visible_to(visibility, t, segments, of_entry)
        return selection.membership(index_scores(Index(q, index.keys, weights)), visible, visibility.top_k)

    return selection.joined(jax.lax.map(of_block, (t, blocks)), segments.shape[1])
