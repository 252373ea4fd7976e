"""The DeepSeek-V4 attention layer: project, compress, attend, mix."""

from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from research.attention.attend import SAVED, Documents, Keys, Prepared
from research.attention.indexer import loss as indexer_loss
from research.attention.indexer.module import Indexer, select
from research.attention.layer import rope
from research.attention.layer.compressor import Compressor
from research.attention.layer.linear import project, weight
from research.attention.layer.norms import RMSNorm, normalize
from research.attention.product import product
from research.attention.spec import Spec
from research.metrics import Mean


class Attention(hk.Module):
    """Shared-key-value attention with low-rank queries and a grouped low-rank output (DeepSeek-V4, section 2.3).

    Parameters are float32 and the same, names included, under every backend and at every sequence length.
    """

    def __init__(self, spec: Spec, kind: str, measure: bool = False, name: str = "attention") -> None:
        """Settings.

        Args:
          spec: of the model.
          kind: one of `visibility.KINDS`.
          measure: whether to measure what the indexer selects, too.
          name: of the module.
        """
        super().__init__(name=name)
        self.spec, self.kind, self.measure = spec, kind, measure

    def __call__(
        self, x: Float[Array, "B S E"], documents: Documents, prepared: Prepared = None
    ) -> tuple[Float[Array, "B S E"], dict[str, Mean]]:
        """Attends.

        Args:
          x: hidden states.
          documents: of the tokens.
          prepared: what the op's `prepare` made of the same documents, if anything.

        Returns:
          In the layer's dtype, 0 where nothing is seen; and of CSA's indexer what `indexer.loss.measure` says when
          measuring, its "kl" alone when it is trained, else nothing.

        Raises:
          ValueError: an argument's shape or dtype is not as above.
        """
        spec, settings, eps = self.spec, self.spec.settings.attention, self.spec.settings.model.norm_eps
        _check(x, documents, spec.settings.model.hidden)
        visibility, positions = spec.visibility(self.kind), documents.positions
        freqs = rope.frequencies(spec.settings.rope, settings.rope_width, compressed=visibility.compresses)
        x = x.astype(spec.settings.model.dtype)

        low_rank = RMSNorm(eps, name="q_norm")(project("q_down", x, settings.q_rank))
        q_up = weight("q_up", (settings.q_rank, settings.heads * settings.head_width)).astype(x.dtype)
        local = RMSNorm(eps, name="kv_norm")(project("kv", x, settings.head_width))
        local = rope.rotate(local, positions, freqs)
        compressed = jnp.zeros((len(x), 0, settings.head_width), x.dtype)
        if visibility.compresses:
            compressed = Compressor(visibility, settings.head_width, eps, freqs)(x, documents)
        keys = Keys(local, compressed)
        sinks = hk.get_parameter("sinks", [settings.heads], jnp.float32, jnp.zeros) if settings.sinks else None

        def queries(q_up: Float[Array, "Q HD"]) -> Float[Array, "B S H D"]:
            q = product("bsi,io->bso", low_rank, q_up).reshape(*positions.shape, -1, settings.head_width)
            return rope.rotate(normalize(q, eps), positions, freqs)

        selected, indexer_means = None, {}
        if visibility.selects:  # in every stage, for a checkpoint of one starts the next
            index = Indexer(settings, eps, freqs)(x, low_rank, documents)
            teacher = indexer_loss.Heads(queries(q_up), keys, sinks)  # compiled only where it is read
            selected = select(index, visibility, documents, spec.scoring) if spec.selects else None
            arguments = (index, teacher, visibility, documents, selected, spec.scoring)
            if self.measure:
                indexer_means = indexer_loss.measure(*arguments)
            elif spec.trains_indexer:
                indexer_means = {"kl": indexer_loss.loss(*arguments)}

        attend, groups = spec.attend(self.kind), settings.out_groups
        down = weight("out_down", (groups, settings.heads * settings.head_width // groups, settings.out_rank))

        def some_heads(
            q_up: Float[Array, "Q HD"], sinks: Float[Array, " H"] | None, down: Float[Array, "G I R"]
        ) -> Float[Array, "B S G R"]:
            """Some heads, by their part of the parameters; makes none, for it may be traced within a scan."""
            out = attend(queries(q_up), keys, documents, sinks=sinks, selected=selected, prepared=prepared)
            out = rope.rotate_back(out, positions, freqs).reshape(*positions.shape, *down.shape[:2])
            return product("bsgi,gir->bsgr", out, down)

        mixed = _some_heads_at_once(some_heads, settings.heads // spec.heads_at_once, q_up, sinks, down.astype(x.dtype))
        return project("out_up", mixed.reshape(*positions.shape, -1), spec.settings.model.hidden), indexer_means


def _some_heads_at_once(
    some_heads: Callable,
    count: int,
    q_up: Float[Array, "Q HD"],
    sinks: Float[Array, " H"] | None,
    down: Float[Array, "G I R"],
) -> Float[Array, "B S G R"]:
    """`some_heads(q_up, sinks, down)`, the heads in `count` parts, one after the other.

    Of a part's inner arrays only what the op names `attend.SAVED` is kept for the backward pass, the rest made again:
    of queries and outputs then exists little more than those of a part.
    """
    if count == 1:
        return some_heads(q_up, sinks, down)
    parts = (
        jnp.moveaxis(q_up.reshape(len(q_up), count, -1), 1, 0),
        None if sinks is None else sinks.reshape(count, -1),
        down.reshape(count, -1, *down.shape[1:]),
    )
    keep = jax.checkpoint_policies.save_only_these_names(*SAVED)
    again = jax.checkpoint(some_heads, policy=keep, prevent_cse=False)  # within a scan nothing else would merge them
    mixed = jax.lax.map(lambda part: again(*part), parts)  # [count, B, S, groups, out_rank]
    mixed = jnp.moveaxis(mixed, 0, 2)
    return mixed.reshape(*mixed.shape[:2], -1, mixed.shape[-1])


def _check(x: Array, documents: Documents, hidden: int) -> None:
    if x.ndim != 3 or x.shape[-1] != hidden:
        raise ValueError(f"x: shape {list(x.shape)}, must be [B, S, {hidden}]")
    for name, array in (("positions", documents.positions), ("segments", documents.segments)):
        if array.shape != x.shape[:2] or array.dtype != jnp.int32:
            raise ValueError(f"documents.{name}: {array.dtype} {list(array.shape)}, must be int32 {list(x.shape[:2])}")
