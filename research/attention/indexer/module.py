"""The lightning indexer: scores every query against small compressed keys, and picks the entries that CSA sees."""

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

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
    """Projects the hidden states to index queries, keys and weights (DeepSeek-V4, equations 13 to 16).

    The inputs are detached: no gradient flows from the indexer into the model.

    Attributes:
      settings: `index_heads` of `index_head_width` channels, entries of `csa_ratio` tokens.
      norm_eps: epsilon of the keys' RMS norm.
      freqs: from `rope.frequencies`.
    """

    def __init__(self, settings: Attention, norm_eps: float, freqs: rope.Frequencies, name: str = "indexer") -> None:
        super().__init__(name=name)
        self.settings, self.norm_eps, self.freqs = settings, norm_eps, freqs

    def __call__(self, x: Float[Array, "B S E"], low_rank: Float[Array, "B S q_rank"], documents: Documents) -> Index:
        """Projects.

        Args:
          x: hidden states.
          low_rank: the layer's normalised low-rank queries.
          documents: the documents of the tokens.

        Returns:
          Queries and keys in the dtype of the inputs, weights in float32.
        """
        x, low_rank = jax.lax.stop_gradient((x, low_rank))
        heads, width = self.settings.index_heads, self.settings.index_head_width
        q = project("q_up", low_rank, heads * width).reshape(*x.shape[:2], heads, width)
        q = rope.rotate(q, documents.positions, self.freqs)
        keys = Compressor(CompressedSparse.make(self.settings), width, self.norm_eps, self.freqs)(x, documents)
        return Index(q, keys, project("head_weights", x, heads, jnp.float32))


def select(index: Index, visibility: CompressedSparse, documents: Documents, scoring: Scoring) -> Bool[Array, "B S C"]:
    """Selects the `top_k` visible entries with the highest scores for each query (DeepSeek-V4, equation 17).

    Has no gradient. Computed for a block of queries at a time, so that no array [S, C] of scores exists.

    Args:
      index: from `Indexer`.
      visibility: which entries each query sees before the selection, and `top_k`.
      documents: the documents of the tokens.
      scoring: how scores are computed.

    Returns:
      The selected entries as booleans; `selection.indices` converts them to indices.
    """
    segments = documents.segments
    entry_segments = visibility_lib.entry_segments(segments, visibility.ratio)
    t, blocks = selection.query_blocks((index.q, index.weights, segments), (0, 0.0, visibility_lib.PADDING))

    def select_in_block(
        block: tuple[Int32[Array, " Q"], tuple[Float[Array, "B Q I W"], Float32[Array, "B Q I"], Int32[Array, "B Q"]]],
    ) -> Bool[Array, "B Q C"]:
        t, (q, weights, segments) = block
        visible = selection.visible_to(visibility, t, segments, entry_segments)
        scores = index_scores(Index(q, index.keys, weights), scoring)
        return selection.membership(scores, visible, visibility.top_k)

    return selection.joined(jax.lax.map(select_in_block, (t, blocks)), segments.shape[1])
