"""How the indexer is trained, and how well it selects, against the attention for which it selects.

For a token t the teacher p_t is what the layer's own heads, in the very attention they perform, give to the entries:
each head's weights over local window, entries and sink sum to 1, and p_t is their sum over the heads, scaled to sum to
1 over the entries that t sees. The student is the softmax of the index scores over the same entries: all visible ones
in the dense stages, the selected ones in the sparse stage. The loss of t is KL(p_t || student), 0 where t sees no
entry. Source: DeepSeek-V3.2, section 2.1.1 (equations 3 and 4), whose attention has neither window nor sink; that these
take their share before the scaling follows from "the main attention scores": a head that attends to other keys counts
less. Teacher and student are float32.

Everything goes a block of queries at a time, and of the heads one by one: beside a block's, no array of [S, C] exists.
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


class Heads(NamedTuple):
    """What the layer attends with, as the op takes it: see `attend.Attend`."""

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
    """The KL divergence above, in nats, over the tokens of documents.

    Its gradient goes to `index` alone. It is computed along with the value, block by block, so that neither scores nor
    teacher are kept or made again for a backward pass.

    Args:
      index: from `Indexer`.
      heads: what was attended with.
      visibility: who sees whom before the selection.
      documents: of the tokens.
      selected: what was attended, in the sparse stage; None in the dense ones.
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
    def add_block(total: Float32[Array, ""], block: "_Block") -> tuple[Float32[Array, ""], None]:
        return total + _divergence(block.index, block.teacher(block.seen), block.seen, scoring), None

    return _over_blocks(add_block, jnp.float32(0.0), visibility, index, heads, segments, selected)[0]


def _loss_forward(
    scoring: Scoring,
    visibility: CompressedSparse,
    index: Index,
    heads: Heads,
    segments: Int32[Array, "B S"],
    selected: Bool[Array, "B S C"] | None,
) -> tuple[Float32[Array, ""], Index]:
    def add_block(carry: tuple[Array, Array], block: "_Block") -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        total, d_keys = carry
        differentiate = jax.value_and_grad(_divergence)
        value, gradient = differentiate(block.index, block.teacher(block.seen), block.seen, scoring)
        return (total + value, d_keys + gradient.keys.astype(jnp.float32)), (gradient.q, gradient.weights)

    start = (jnp.float32(0.0), jnp.zeros(index.keys.shape, jnp.float32))
    (total, d_keys), blocks = _over_blocks(add_block, start, visibility, index, heads, segments, selected)
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
    """How well the indexer selects; arguments as `loss`. It costs more, and has no gradient.

    Returns:
      kl: as `loss`, whether it is trained with or not.
      The others are over the tokens that see more than `top_k` entries, whatever the stage. Attention in them is the
      teacher over all visible entries, as if none were ruled out:
      recall: share of the `top_k` most attended entries that the indexer selects.
      coverage: share of the attention to entries that falls on those the indexer selects.
      entropy: of the softmax of the scores over all visible entries, in nats.
      useful: share of the visible entries that is selected, of what a pass over all of them computes.
    """
    top_k = visibility.top_k

    def add_block(sums: dict[str, Mean], block: "_Block") -> tuple[dict[str, Mean], None]:
        scores, dense = index_scores(block.index, scoring), block.teacher(block.visible)
        chosen = selection.membership(scores, block.visible, top_k)
        best = selection.membership(dense, block.visible, top_k)
        log_student, visible = _log_softmax(scores, block.visible), block.visible.sum(axis=-1)
        token_values = {
            "recall": (chosen & best).sum(axis=-1) / top_k,
            "coverage": jnp.where(chosen, dense, 0.0).sum(axis=-1),
            "entropy": -(jnp.exp(log_student) * log_student).sum(axis=-1),
            "useful": top_k / jnp.maximum(visible, 1),
        }
        choice = visible > top_k
        new = {name: Mean(jnp.where(choice, value, 0.0).sum(), choice.sum()) for name, value in token_values.items()}
        return jax.tree.map(jnp.add, sums, new), None

    nothing = {name: Mean(jnp.float32(0.0), jnp.int32(0)) for name in ("recall", "coverage", "entropy", "useful")}
    sums, _ = _over_blocks(add_block, nothing, visibility, index, heads, documents.segments, selected)
    return {"kl": loss(index, heads, visibility, documents, selected, scoring), **sums}


class _Block(NamedTuple):
    """Some queries, what they see, and their heads; Q of them, `window - 1 + Q` local keys before and at them."""

    index: Index  # their queries and weights, all keys
    heads: tuple  # `Heads` of their queries, their local keys and all entries
    sees_local: Bool[Array, "B Q local"]
    visible: Bool[Array, "B Q C"]
    seen: Bool[Array, "B Q C"]  # those attended

    def teacher(self, seen: Bool[Array, "B Q C"]) -> Float32[Array, "B Q C"]:
        """Rows that sum to 1 or, where nothing is seen, 0, of an attention to `seen` entries."""
        heads = self.heads
        scale = heads.q.shape[-1] ** -0.5

        def add_head(attended: Float32[Array, "B Q C"], head: tuple) -> tuple[Float32[Array, "B Q C"], None]:
            q, sink = head

            def logits(keys: Float[Array, "B K D"], mask: Bool[Array, "B Q K"]) -> Float32[Array, "B Q K"]:
                dots = product("bqd,bkd->bqk", q, keys, jnp.float32)
                return jnp.where(mask, dots * scale, MASK_VALUE)

            local, entries = logits(heads.keys.local, self.sees_local), logits(heads.keys.compressed, seen)
            peak = jnp.maximum(local.max(axis=-1, keepdims=True), entries.max(axis=-1, keepdims=True, initial=sink))
            weights = jnp.where(seen, jnp.exp(entries - peak), 0.0)
            # At least 1, the largest of the terms: also where nothing is seen, and all of them are masked.
            total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - peak)
            total += jnp.exp(local - peak).sum(axis=-1, keepdims=True)
            return attended + weights / total, None

        sinks = jnp.full(heads.q.shape[2], MASK_VALUE) if heads.sinks is None else heads.sinks
        nothing = jnp.zeros(seen.shape, jnp.float32)
        attended, _ = jax.lax.scan(add_head, nothing, (jnp.moveaxis(heads.q, 2, 0), sinks))
        total = attended.sum(axis=-1, keepdims=True)
        return attended / jnp.where(total == 0.0, 1.0, total)


def _over_blocks(
    step: Callable[[Any, _Block], tuple[Any, Any]],
    start: Any,
    visibility: CompressedSparse,
    index: Index,
    heads: Heads,
    segments: Int32[Array, "B S"],
    selected: Bool[Array, "B S C"] | None,
) -> tuple[Any, Any]:
    """`jax.lax.scan` of `step(carry, _Block)` over blocks of queries."""
    seq_len, padding = segments.shape[1], visibility_lib.PADDING
    entry_segments = visibility_lib.entry_segments(segments, visibility.ratio)
    attended = {} if selected is None else {"selected": selected}
    t, blocks = selection.query_blocks(
        (index.q, index.weights, heads.q, segments, attended),
        (0, 0.0, 0, padding, jax.tree.map(lambda _: False, attended)),
    )
    reach = min(visibility.window, seq_len) - 1
    widths = ((0, 0), (reach, t.size - seq_len))
    local = jnp.pad(heads.keys.local, (*widths, (0, 0)))
    local_segments = jnp.pad(segments, widths, constant_values=padding)

    def step_over(carry: Any, xs: tuple) -> tuple[Any, Any]:
        t, (index_q, weights, q, query_segments, attended) = xs
        span = reach + len(t)
        band, key_segments = (jax.lax.dynamic_slice_in_dim(x, t[0], span, axis=1) for x in (local, local_segments))
        j = t[0] - reach + jnp.arange(span)
        sees_local = visibility.local_mask(
            t[None, :, None], j[None, None], query_segments[:, :, None], key_segments[:, None]
        )
        visible = selection.visible_to(visibility, t, query_segments, entry_segments)
        seen = selection.at_most(visible & attended["selected"], visibility.top_k) if attended else visible
        block_heads = heads._replace(q=q, keys=heads.keys._replace(local=band))
        return step(carry, _Block(Index(index_q, index.keys, weights), block_heads, sees_local, visible, seen))

    return jax.lax.scan(step_over, start, (t, blocks))


def _divergence(
    index: Index, teacher: Float32[Array, "B Q C"], seen: Bool[Array, "B Q C"], scoring: Scoring
) -> Float32[Array, ""]:
    """Sum over the queries of KL(teacher || softmax of the scores)."""
    log_student = _log_softmax(index_scores(index, scoring), seen)
    return jnp.sum(jax.scipy.special.xlogy(teacher, teacher) - teacher * log_student)


def _log_softmax(scores: Float32[Array, "B Q C"], seen: Bool[Array, "B Q C"]) -> Float32[Array, "B Q C"]:
    """Over the seen ones; finite at the others, also in rows where nothing is seen."""
    return jax.nn.log_softmax(jnp.where(seen, scores, MASK_VALUE), axis=-1)
