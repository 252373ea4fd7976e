"""The lightning indexer: scores every query against small compressed keys, and picks the entries that CSA sees."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from research.attention import visibility as visibility_lib
from research.attention.indexer import selection
from research.attention.indexer.scores import Index, Scoring, index_scores
from research.attention.layer import rope
from research.attention.layer.compressor import Compressor
from research.attention.layer.linear import project


class Indexer(hk.Module):
    """Projects the hidden states to queries, keys and weights (DeepSeek-V4, equations 13 to 16).

    Its inputs are detached: no gradient flows from it into the model.

    Attributes:
      ratio: tokens per entry.
      heads: index heads.
      width: channels of an index head.
      norm_eps: of the compressed keys' RMS norm.
      freqs: from `rope.frequencies`.
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


def select(
    index: Index,
    visibility: visibility_lib.CompressedSparse,
    segments: jax.Array,
    scoring: Scoring,
) -> jax.Array:
    """The `top_k` best scored of each query's visible entries (DeepSeek-V4, equation 17); no gradient flows through it.

    A block of queries at a time, so that of the scores no more than a block's exist.

    Args:
      index: from `Indexer`.
      visibility: who sees whom before the selection, and how many are selected.
      segments: int32 [B, S].
      scoring: how scores are computed.

    Returns:
      bool [B, S, C]; as indices: `selection.indices`.
    """
    of_entry = visibility_lib.entry_segments(segments, visibility.ratio)
    t, blocks = selection.query_blocks((index.q, index.weights, segments), (0, 0.0, visibility_lib.PADDING))

    def of_block(block):
        t, (q, weights, segments) = block
        visible = selection.visible_to(visibility, t, segments, of_entry)
        scores = index_scores(Index(q, index.keys, weights), scoring)
        return selection.membership(scores, visible, visibility.top_k)

    return selection.joined(jax.lax.map(of_block, (t, blocks)), segments.shape[1])
