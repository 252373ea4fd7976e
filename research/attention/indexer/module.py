"""The lightning indexer: scores every query against small compressed keys, and picks the entries that CSA sees."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from research.attention import visibility as visibility_lib
from research.attention.attend import Documents
from research.attention.indexer import selection
from research.attention.indexer.scores import Index, Scoring, index_scores
from research.attention.layer import rope
from research.attention.layer.compressor import Compressor
from research.attention.layer.linear import project
from research.attention.visibility import CompressedSparse
from research.settings.attention import Attention


class Indexer(hk.Module):
    """Projects the hidden states to queries, keys and weights (DeepSeek-V4, equations 13 to 16).

    Its inputs are detached: no gradient flows from it into the model.

    Attributes:
      settings: `index_heads` of `index_head_width` channels, over entries of `csa_ratio` tokens.
      norm_eps: of the compressed keys' RMS norm.
      freqs: from `rope.frequencies`.
    """

    def __init__(self, settings: Attention, norm_eps: float, freqs: np.ndarray, name: str = "indexer") -> None:
        super().__init__(name=name)
        self.settings, self.norm_eps, self.freqs = settings, norm_eps, freqs

    def __call__(self, x: Float[Array, "B S E"], low_rank: Float[Array, "B S Q"], documents: Documents) -> Index:
        """Projects.

        Args:
          x: hidden states.
          low_rank: the layer's normalised low-rank query.
          documents: of the tokens.

        Returns:
          Queries and keys in the dtype of the inputs.
        """
        x, low_rank = jax.lax.stop_gradient((x, low_rank))
        heads, width = self.settings.index_heads, self.settings.index_head_width
        q = project("q_up", low_rank, heads * width).reshape(*x.shape[:2], heads, width)
        q = rope.rotate(q, documents.positions, self.freqs)
        keys = Compressor(CompressedSparse.make(self.settings), width, self.norm_eps, self.freqs)(x, documents)
        return Index(q, keys, project("head_weights", x, heads, jnp.float32))


def select(index: Index, visibility: CompressedSparse, documents: Documents, scoring: Scoring) -> Bool[Array, "B S C"]:
    """The `top_k` best scored of each query's visible entries (DeepSeek-V4, equation 17); no gradient flows through it.

    A block of queries at a time, so that of the scores no more than a block's exist.

    Args:
      index: from `Indexer`.
      visibility: who sees whom before the selection, and how many are selected.
      documents: of the tokens.
      scoring: how scores are computed.

    Returns:
      A membership; as indices: `selection.indices`.
    """
    segments = documents.segments
    entry_segments = visibility_lib.entry_segments(segments, visibility.ratio)
    t, blocks = selection.query_blocks((index.q, index.weights, segments), (0, 0.0, visibility_lib.PADDING))

    def select_in_block(block: tuple) -> Bool[Array, "B Q C"]:
        t, (q, weights, segments) = block
        visible = selection.visible_to(visibility, t, segments, entry_segments)
        scores = index_scores(Index(q, index.keys, weights), scoring)
        return selection.membership(scores, visible, visibility.top_k)

    return selection.joined(jax.lax.map(select_in_block, (t, blocks)), segments.shape[1])
