"""The lightning indexer: scores every query against small compressed keys, and picks the entries that CSA sees."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from research.attention import rope
from research.attention import visibility as visibility_lib
from research.attention.compressor import Compressor
from research.attention.linear import project


class Indexer(hk.Module):
    """Selects the `top_k` visible entries of each query (DeepSeek-V4, equations 13 to 17).

    No gradient flows into its inputs, nor through the selection.

    Attributes:
      visibility: who sees whom before the selection, and how many are selected.
      heads: index heads.
      width: channels of an index head.
      norm_eps: of the compressed keys' RMS norm.
      freqs: float32, from `rope.frequencies`.
    """

    def __init__(
        self,
        visibility: visibility_lib.CompressedSparse,
        heads: int,
        width: int,
        *,
        norm_eps: float,
        freqs: np.ndarray,
        name: str = "indexer",
    ):
        super().__init__(name=name)
        self.visibility = visibility
        self.heads = heads
        self.width = width
        self.norm_eps = norm_eps
        self.freqs = freqs

    def __call__(self, x_BxSxE: jax.Array, low_rank_q: jax.Array, positions: jax.Array, segments: jax.Array):
        """Selects entries.

        Args:
          x_BxSxE: hidden states.
          low_rank_q: [B, S, q_rank], the layer's normalised low-rank query.
          positions: int32 [B, S].
          segments: int32 [B, S].

        Returns:
          bool [B, S, C]: whether the query sees the entry.
        """
        x_BxSxE, low_rank_q = jax.lax.stop_gradient((x_BxSxE, low_rank_q))
        batch, seq_len, _ = x_BxSxE.shape
        q = project("q_up", low_rank_q, self.heads * self.width).reshape(batch, seq_len, self.heads, self.width)
        q = rope.rotate(q, positions, self.freqs)
        compress = Compressor(self.visibility.ratio, self.width, overlap=True, norm_eps=self.norm_eps, freqs=self.freqs)
        keys = compress(x_BxSxE, positions, segments)
        scores = index_scores(q, keys, project("head_weights", x_BxSxE, self.heads, jnp.float32))
        return membership(scores, visible_entries(self.visibility, segments), self.visibility.top_k)


def index_scores(q_BxSxIxD: jax.Array, keys_BxCxD: jax.Array, weights_BxSxI: jax.Array) -> jax.Array:
    """float32 [B, S, C]: `sum_i weights_i * relu(q_i . key) / sqrt(I * D)` over the I index heads.

    One head at a time: all of them at once would take I times the memory of the result.
    """
    _, seq_len, heads, width = q_BxSxIxD.shape
    batch, entries, _ = keys_BxCxD.shape
    scale = width**-0.5 * heads**-0.5

    def add_head(scores_BxSxC, head):
        q_BxSxD, weight_BxS = head
        dots = jnp.einsum(
            "bsd,bcd->bsc",
            q_BxSxD,
            keys_BxCxD,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return scores_BxSxC + jax.nn.relu(dots) * (weight_BxS * scale)[..., None], None

    nothing = jnp.zeros((batch, seq_len, entries), jnp.float32)
    by_head = (jnp.moveaxis(q_BxSxIxD, 2, 0), jnp.moveaxis(weights_BxSxI, 2, 0))
    return jax.lax.scan(add_head, nothing, by_head)[0]


def visible_entries(visibility: visibility_lib.CompressedSparse, segments: jax.Array) -> jax.Array:
    """Bool [B, S, C]: the entries that a query may select, `segments` being int32 [B, S]."""
    t = jnp.arange(segments.shape[-1])[:, None]
    c = jnp.arange(visibility.num_entries(segments.shape[-1]))[None]
    of_entry = visibility_lib.entry_segments(segments, visibility.ratio)
    in_document = visibility_lib.same_segment(segments[:, :, None], of_entry[:, None, :])
    return visibility.sees_compressed(t, c)[None] & in_document


def membership(scores: jax.Array, visible: jax.Array, top_k: int) -> jax.Array:
    """Which entries `jax.lax.top_k` picks among the visible ones, without an array of [S, K, C].

    Args:
      scores: float32 [..., S, C].
      visible: bool [..., S, C].
      top_k: entries to pick, positive; where fewer are visible, all are picked.

    Returns:
      bool [..., S, C] with `min(top_k, visible entries)` True in each row. At ties the lower index wins; +0 ranks
      above -0, as in `jax.lax.top_k`.
    """
    if top_k >= scores.shape[-1]:
        return visible
    order = _total_order(jnp.where(visible, scores, -jnp.inf))
    kth = _kth_largest(order, top_k)
    above = visible & (order > kth)
    tied = visible & (order == kth)
    room = top_k - above.sum(axis=-1, keepdims=True)
    return above | (tied & (jnp.cumsum(tied, axis=-1) <= room))


def _kth_largest(x: jax.Array, k: int) -> jax.Array:
    """int32 [..., 1]: the k-th largest along the last axis, bit by bit from the top (a sort is slower, see LOG.md)."""
    flip = jnp.uint32(1 << 31)  # unsigned integers in the order of the signed ones
    keys = jax.lax.bitcast_convert_type(x, jnp.uint32) ^ flip

    def add_bit(step, found):
        candidate = found | (flip >> step.astype(jnp.uint32))
        enough = jnp.sum(keys >= candidate, axis=-1, keepdims=True) >= k
        return jnp.where(enough, candidate, found)

    found = jax.lax.fori_loop(0, 32, add_bit, jnp.zeros((*x.shape[:-1], 1), jnp.uint32))
    return jax.lax.bitcast_convert_type(found ^ flip, jnp.int32)


def _total_order(x: jax.Array) -> jax.Array:
    """int32 that compare as `jax.lax.top_k` orders float32: -0 below +0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
