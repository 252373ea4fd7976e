"""The DeepSeek-V4 attention layer: project, compress, attend through a backend, mix."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from research.attention import backends
from research.attention.indexer import loss as indexer_loss
from research.attention.indexer.module import Indexer, select
from research.attention.layer import rope as rope_lib
from research.attention.layer.compressor import Compressor
from research.attention.layer.linear import project, weight
from research.attention.layer.norms import RMSNorm, normalize
from research.attention.product import product
from research.attention.spec import AttentionSpec, RopeSpec
from research.metrics import Mean


class Attention(hk.Module):
    """Shared-key-value attention with low-rank queries and a grouped low-rank output (DeepSeek-V4, section 2.3).

    Parameters are float32 and the same, names included, under every backend and at every sequence length.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        rope: RopeSpec,
        kind: str,
        hidden: int,
        norm_eps: float,
        dtype: Any,
        measure: bool = False,
        name: str = "attention",
    ):
        """Settings.

        Args:
          spec: of all the model's layers.
          rope: likewise.
          kind: one of `spec.KINDS`.
          hidden: the width E.
          norm_eps: of all RMS norms.
          dtype: what matrices are multiplied in.
          measure: whether to measure what the indexer selects, too.
          name: of the module.
        """
        super().__init__(name=name)
        self.spec = spec
        self.kind = kind
        self.measure = measure
        self.visibility = spec.visibility(kind)
        self.options = spec.options(kind)
        self.freqs = rope_lib.frequencies(rope, spec.rope_width, compressed=kind != "sliding")
        self.hidden = hidden
        self.norm_eps = norm_eps
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self,
        x_BxSxE: jax.Array,
        positions: jax.Array,
        segments: jax.Array | None = None,
        prepared: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, Mean]]:
        """Attends.

        Args:
          x_BxSxE: hidden states.
          positions: int32 [B, S], what RoPE rotates by; visibility counts tokens on the sequence grid instead.
          segments: int32 [B, S], >= 0 for a document, -1 for padding; None means one document.
          prepared: what the backend's `prepare` made of the same visibility, segments and options, if anything.

        Returns:
          [B, S, E] in the layer's dtype, 0 where nothing is seen; and of CSA's indexer what `indexer.loss.measure` says
          when measuring, its "kl" alone when it is trained, else nothing.

        Raises:
          ValueError: an argument's shape or dtype is not as above.
        """
        spec = self.spec
        _check(x_BxSxE, positions, segments, self.hidden)
        batch, seq_len, _ = x_BxSxE.shape
        x_BxSxE = x_BxSxE.astype(self.dtype)

        low_rank_q = RMSNorm(self.norm_eps, name="q_norm")(project("q_down", x_BxSxE, spec.q_rank))
        q_up = weight("q_up", (spec.q_rank, spec.heads * spec.head_width)).astype(self.dtype)
        local_BxSxD = RMSNorm(self.norm_eps, name="kv_norm")(project("kv", x_BxSxE, spec.head_width))
        documents = jnp.zeros(positions.shape, jnp.int32) if segments is None else segments
        local_BxSxD = rope_lib.rotate(local_BxSxD, positions, self.freqs)
        compressed_BxCxD = self._compress(x_BxSxE, positions, documents)
        sinks_H = hk.get_parameter("sinks", [spec.heads], jnp.float32, jnp.zeros) if spec.sinks else None
        selected, of_indexer = self._select(
            x_BxSxE, low_rank_q, positions, documents, (q_up, local_BxSxD, compressed_BxCxD, sinks_H)
        )

        def of_heads(low_rank_q, local_BxSxD, compressed_BxCxD, of_group):
            """[B, S, groups, out_rank] of some heads, from their q_up, their sinks and their groups' out_down."""
            q_up, sinks, down = of_group
            out_BxSxHxD = backends.get(spec.backend).attend(
                self._queries(low_rank_q, q_up, positions),
                local_BxSxD,
                compressed_BxCxD,
                visibility=self.visibility,
                sinks=sinks,
                segments=segments,
                selected=selected,
                options=self.options,
                prepared=prepared,
                target=spec.target,
            )
            out_BxSxHxD = rope_lib.rotate_back(out_BxSxHxD, positions, self.freqs)
            groups = out_BxSxHxD.reshape(batch, seq_len, *down.shape[:2])
            return product("bsgi,gir->bsgr", groups, down)

        group_width = spec.heads * spec.head_width // spec.out_groups
        down = weight("out_down", (spec.out_groups, group_width, spec.out_rank)).astype(self.dtype)
        mixed = _in_groups(of_heads, (low_rank_q, local_BxSxD, compressed_BxCxD), (q_up, sinks_H, down), spec)
        return project("out_up", mixed.reshape(batch, seq_len, -1), self.hidden), of_indexer

    def _queries(self, low_rank_q, q_up, positions):
        """[B, S, H, D], of as many heads as `q_up` [q_rank, H * D] has."""
        q_BxSxHxD = product("bsi,io->bso", low_rank_q, q_up).reshape(*positions.shape, -1, self.spec.head_width)
        q_BxSxHxD = normalize(q_BxSxHxD, self.norm_eps)
        return rope_lib.rotate(q_BxSxHxD, positions, self.freqs)

    @hk.transparent
    def _compress(self, x_BxSxE, positions, segments):
        """The entries [B, C, D]."""
        if self.kind == "sliding":
            return jnp.zeros((x_BxSxE.shape[0], 0, self.spec.head_width), self.dtype)
        shared = {"norm_eps": self.norm_eps, "freqs": self.freqs}
        compress = Compressor(self.visibility.ratio, self.spec.head_width, overlap=self.kind == "csa", **shared)
        return compress(x_BxSxE, positions, segments)

    @hk.transparent
    def _select(self, x_BxSxE, low_rank_q, positions, segments, of_heads):
        """The indexer's choice, bool [B, S, C] or None where all entries are attended; and what is said of it."""
        spec = self.spec
        if self.kind != "csa":
            return None, {}
        # In every stage, for a checkpoint of one starts the next.
        project_index = Indexer(
            spec.csa_ratio, spec.index_heads, spec.index_head_width, norm_eps=self.norm_eps, freqs=self.freqs
        )
        index = project_index(x_BxSxE, low_rank_q, positions, segments)
        q_up, *others = of_heads
        heads = indexer_loss.Heads(
            self._queries(low_rank_q, q_up, positions), *others
        )  # compiled only where it is read
        selected = select(index, spec.selection, segments, spec.scoring) if spec.selects else None
        if self.measure:
            return selected, indexer_loss.measure(index, heads, spec.selection, segments, selected, spec.scoring)
        if spec.trains_indexer:
            kl = indexer_loss.loss(index, heads, spec.selection, segments, selected, spec.scoring)
            return selected, {"kl": kl}
        return selected, {}


def _in_groups(of_heads, shared, by_head, spec: AttentionSpec):
    """`of_heads(*shared, by_head)`, or as many heads at once as the spec says.

    The groups go one after the other, and of their inner arrays only what the backend names `backends.SAVED` is kept
    for the backward pass, the rest made again: of queries and outputs then exists little more than those of a group.
    """
    if not spec.heads_at_once:
        return of_heads(*shared, by_head)
    if spec.heads % spec.heads_at_once:
        raise ValueError(f"heads_at_once={spec.heads_at_once}: must be a divisor of {spec.heads}")
    count = spec.heads // spec.heads_at_once
    q_up, sinks, down = by_head
    groups = (
        jnp.moveaxis(q_up.reshape(len(q_up), count, -1), 1, 0),
        None if sinks is None else sinks.reshape(count, -1),
        down.reshape(count, -1, *down.shape[1:]),
    )
    keep = jax.checkpoint_policies.save_only_these_names(*backends.SAVED)
    again = jax.checkpoint(of_heads, policy=keep, prevent_cse=False)  # within a scan nothing else would merge them
    mixed = jax.lax.map(lambda group: again(*shared, group), groups)  # [count, B, S, groups, out_rank]
    return jnp.moveaxis(mixed, 0, 2)


def _check(x, positions, segments, hidden: int) -> None:
    if x.ndim != 3 or x.shape[-1] != hidden:
        raise ValueError(f"x: shape {list(x.shape)}, must be [B, S, {hidden}]")
    integers = {"positions": positions} if segments is None else {"positions": positions, "segments": segments}
    for name, array in integers.items():
        if array.shape != x.shape[:2] or array.dtype != jnp.int32:
            raise ValueError(f"{name}: {array.dtype} {list(array.shape)}, must be int32 {list(x.shape[:2])}")
