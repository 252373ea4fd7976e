"""The loss of CSA's indexer, and measures of its selection, with the layer's attention as the teacher.

The loss of a token t is KL(p_t || student), 0 if t sees no entry. Teacher and student are distributions over the
entries that t attends to: all visible ones in the dense stages, the selected ones in the sparse stage.

* The teacher p_t is the sum of the heads' attention weights on these entries, normalised to sum 1. The weights of a
  head sum to 1 over local keys, entries and sink, so a head that mostly attends to other keys counts less.
* The student is the softmax of the index scores over these entries.

Both are float32. Source: DeepSeek-V3.2, section 2.1.1 (equations 3 and 4). Its attention has no window and no sink; the
normalisation over all keys follows from "the main attention scores".

Computed for a block of queries and one head at a time, so that no array [S, C] exists.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from research.attention import visibility as visibility_lib
from research.attention.attend import Documents, Keys
from research.attention.backends.dot_product import MASK_VALUE
from research.attention.indexer import selection
from research.attention.indexer.scores import Index, Scoring, index_scores
from research.attention.product import product
from research.attention.visibility import CompressedSparse
from research.metrics import Mean

Carry = tuple[Float32[Array, ""], Float32[Array, "B C W"]]  # the loss so far, and its gradient with respect to the keys
QueryGradients = tuple[Float[Array, "B Q I W"], Float32[Array, "B Q I"]]  # with respect to queries and weights


class Heads(NamedTuple):
    """The arguments of the layer's call of `attend.Attend`."""

    q: Float[Array, "B S H D"]
    keys: Keys
    sinks: Float32[Array, " H"] | None


def loss(
    index: Index,
    heads: Heads,
    visibility: CompressedSparse,
    documents: Documents,
    selected: Bool[Array, "B S C"] | None,
    scoring: Scoring,
) -> Mean:
    """The mean KL divergence in nats over the tokens of documents.

    Only `index` has a gradient. It is computed together with the value, so that scores and teacher are neither saved
    nor recomputed for a backward pass.

    Args:
      index: from `Indexer`.
      heads: queries, keys and sinks of the layer's attention.
      visibility: which entries each query sees before the selection.
      documents: the documents of the tokens.
      selected: the selected entries in the sparse stage; None in the dense stages.
      scoring: how scores are computed.
    """
    segments = documents.segments
    return Mean(_loss(scoring, visibility, index, heads, segments, selected), (segments >= 0).sum())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(
    scoring: Scoring,
    visibility: CompressedSparse,
    index: Index,
    heads: Heads,
    segments: Int32[Array, "B S"],
    selected: Bool[Array, "B S C"] | None,
) -> Float32[Array, ""]:
    """The sum of the loss over the tokens."""

    def add_block(total: Float32[Array, ""], block: "_Block") -> tuple[Float32[Array, ""], None]:
        return total + _divergence(block.index, block.teacher(block.attended), block.attended, scoring), None

    return _scan_query_blocks(add_block, jnp.float32(0.0), visibility, index, heads, segments, selected)[0]


def _loss_forward(
    scoring: Scoring,
    visibility: CompressedSparse,
    index: Index,
    heads: Heads,
    segments: Int32[Array, "B S"],
    selected: Bool[Array, "B S C"] | None,
) -> tuple[Float32[Array, ""], Index]:
    def add_block(carry: Carry, block: "_Block") -> tuple[Carry, QueryGradients]:
        total, d_keys = carry
        arguments = block.index, block.teacher(block.attended), block.attended, scoring
        value, gradient = jax.value_and_grad(_divergence)(*arguments)
        return (total + value, d_keys + gradient.keys.astype(jnp.float32)), (gradient.q, gradient.weights)

    zeros = (jnp.float32(0.0), jnp.zeros(index.keys.shape, jnp.float32))
    (total, d_keys), blocks = _scan_query_blocks(add_block, zeros, visibility, index, heads, segments, selected)
    d_q, d_weights = (selection.joined(x, segments.shape[1]) for x in blocks)
    return total, Index(d_q, d_keys.astype(index.keys.dtype), d_weights)


def _loss_backward(
    scoring: Scoring, visibility: CompressedSparse, gradient: Index, d_total: Float32[Array, ""]
) -> tuple[Index, None, None, None]:
    del scoring, visibility
    return jax.tree.map(lambda x: x * d_total.astype(x.dtype), gradient), None, None, None


_loss.defvjp(_loss_forward, _loss_backward)


def measure(
    index: Index,
    heads: Heads,
    visibility: CompressedSparse,
    documents: Documents,
    selected: Bool[Array, "B S C"] | None,
    scoring: Scoring,
) -> dict[str, Mean]:
    """Measures of the selection. Arguments as `loss`; it takes more time than `loss`, and has no gradient.

    Returns:
      kl: as `loss`, in every stage.
      The others are over tokens that see more than `top_k` entries; attention is the teacher over all visible ones:
      recall: fraction of the `top_k` most attended entries that the indexer selects.
      coverage: fraction of the attention on entries that is on those that the indexer selects.
      entropy: of the softmax of the scores over all visible entries, in nats.
      useful: fraction of the visible entries that is selected.
    """
    top_k = visibility.top_k

    def add_block(sums: dict[str, Mean], block: "_Block") -> tuple[dict[str, Mean], None]:
        scores, dense = index_scores(block.index, scoring), block.teacher(block.visible)
        selected = selection.membership(scores, block.visible, top_k)
        best = selection.membership(dense, block.visible, top_k)
        log_student, visible = _log_softmax(scores, block.visible), block.visible.sum(axis=-1)
        token_values = {
            "recall": (selected & best).sum(axis=-1) / top_k,
            "coverage": jnp.where(selected, dense, 0.0).sum(axis=-1),
            "entropy": -(jnp.exp(log_student) * log_student).sum(axis=-1),
            "useful": top_k / jnp.maximum(visible, 1),
        }
        counted = visible > top_k
        new = {name: Mean(jnp.where(counted, value, 0.0).sum(), counted.sum()) for name, value in token_values.items()}
        return jax.tree.map(jnp.add, sums, new), None

    zeros = {name: Mean(jnp.float32(0.0), jnp.int32(0)) for name in ("recall", "coverage", "entropy", "useful")}
    sums, _ = _scan_query_blocks(add_block, zeros, visibility, index, heads, documents.segments, selected)
    return {"kl": loss(index, heads, visibility, documents, selected, scoring), **sums}


class _Block(NamedTuple):
    """A block of queries, with N = `min(window, S) - 1 + Q` local keys, the last of them at the last query.

    Attributes:
      index: queries and weights of the block, all keys.
      heads: `Heads` with the queries and local keys of the block, and all entries; its lengths differ from `Heads`'.
      local_mask: the visible local keys.
      visible: the visible entries.
      attended: the entries that are attended to.
    """

    index: Index
    heads: tuple
    local_mask: Bool[Array, "B Q N"]
    visible: Bool[Array, "B Q C"]
    attended: Bool[Array, "B Q C"]

    def teacher(self, attended: Bool[Array, "B Q C"]) -> Float32[Array, "B Q C"]:
        """The teacher of attention to these entries. Rows sum to 1, or to 0 if there are none."""
        heads = self.heads
        scale = heads.q.shape[-1] ** -0.5

        def add_head(
            total: Float32[Array, "B Q C"], head: tuple[Float[Array, "B Q D"], Float32[Array, ""]]
        ) -> tuple[Float32[Array, "B Q C"], None]:
            q, sink = head

            def logits(keys: Float[Array, "B N D"], mask: Bool[Array, "B Q N"]) -> Float32[Array, "B Q N"]:
                dots = product("bqd,bkd->bqk", q, keys, jnp.float32)
                return jnp.where(mask, dots * scale, MASK_VALUE)

            local, entries = logits(heads.keys.local, self.local_mask), logits(heads.keys.compressed, attended)
            row_max = jnp.maximum(local.max(axis=-1, keepdims=True), entries.max(axis=-1, keepdims=True, initial=sink))
            weights = jnp.where(attended, jnp.exp(entries - row_max), 0.0)
            # Never 0: the term of the largest logit is 1, also if all are masked.
            row_sum = weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - row_max)
            row_sum += jnp.exp(local - row_max).sum(axis=-1, keepdims=True)
            return total + weights / row_sum, None

        sinks = jnp.full(heads.q.shape[2], MASK_VALUE) if heads.sinks is None else heads.sinks
        zeros = jnp.zeros(attended.shape, jnp.float32)
        total, _ = jax.lax.scan(add_head, zeros, (jnp.moveaxis(heads.q, 2, 0), sinks))
        row_sum = total.sum(axis=-1, keepdims=True)
        return total / jnp.where(row_sum == 0.0, 1.0, row_sum)


def _scan_query_blocks(
    body: Callable[[Any, _Block], tuple[Any, Any]],
    carry: Any,
    visibility: CompressedSparse,
    index: Index,
    heads: Heads,
    segments: Int32[Array, "B S"],
    selected: Bool[Array, "B S C"] | None,
) -> tuple[Any, Any]:
    """`jax.lax.scan` of `body(carry, block)` over the blocks of queries."""
    seq_len, padding = segments.shape[1], visibility_lib.PADDING
    entry_segments = visibility_lib.entry_segments(segments, visibility.ratio)
    t, blocks = selection.query_blocks(
        (index.q, index.weights, heads.q, segments, selected),
        (0, 0.0, 0, padding, None if selected is None else False),
    )
    reach = min(visibility.window, seq_len) - 1
    widths = ((0, 0), (reach, t.size - seq_len))
    local = jnp.pad(heads.keys.local, (*widths, (0, 0)))
    local_segments = jnp.pad(segments, widths, constant_values=padding)

    def scan_block(carry: Any, xs: tuple) -> tuple[Any, Any]:
        t, (index_q, weights, q, query_segments, selected) = xs
        span = reach + len(t)
        band, key_segments = (jax.lax.dynamic_slice_in_dim(x, t[0], span, axis=1) for x in (local, local_segments))
        j = t[0] - reach + jnp.arange(span)
        local_mask = visibility.local_mask(
            t[None, :, None], j[None, None], query_segments[:, :, None], key_segments[:, None]
        )
        visible = selection.visible_to(visibility, t, query_segments, entry_segments)
        attended = visible if selected is None else selection.at_most(visible & selected, visibility.top_k)
        block_heads = heads._replace(q=q, keys=heads.keys._replace(local=band))
        return body(carry, _Block(Index(index_q, index.keys, weights), block_heads, local_mask, visible, attended))

    return jax.lax.scan(scan_block, carry, (t, blocks))


def _divergence(
    index: Index, teacher: Float32[Array, "B Q C"], attended: Bool[Array, "B Q C"], scoring: Scoring
) -> Float32[Array, ""]:
    """Sum over the queries of KL(teacher || softmax of the scores)."""
    log_student = _log_softmax(index_scores(index, scoring), attended)
    return jnp.sum(jax.scipy.special.xlogy(teacher, teacher) - teacher * log_student)


def _log_softmax(scores: Float32[Array, "B Q C"], mask: Bool[Array, "B Q C"]) -> Float32[Array, "B Q C"]:
    """Over the entries in the mask. Finite at all others, and in rows whose mask is empty."""
    return jax.nn.log_softmax(jnp.where(mask, scores, MASK_VALUE), axis=-1)
