"""The DeepSeek-V4 attention layer: project, compress, attend, mix."""

from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

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
    """Attention with shared keys and values, low-rank queries and grouped low-rank output (DeepSeek-V4, section 2.3).

    Parameters are float32. Their names and shapes do not depend on the backend and the sequence length.
    """

    def __init__(self, spec: Spec, kind: str, measure: bool = False, name: str = "attention") -> None:
        """Initializes the module.

        Args:
          spec: the model's spec.
          kind: the kind of attention, one of `visibility.KINDS`.
          measure: whether to measure the indexer's selection.
          name: the module's name.
        """
        super().__init__(name=name)
        self.spec, self.kind, self.measure = spec, kind, measure

    def __call__(
        self, x: Float[Array, "B S E"], documents: Documents, prepared: Prepared = None
    ) -> tuple[Float[Array, "B S E"], dict[str, Mean]]:
        """Attends.

        Args:
          x: hidden states.
          documents: the documents of the tokens.
          prepared: the result of the op's `prepare` for the same documents, or None.

        Returns:
          The output in the model's dtype, 0 at tokens that see no key, and means for CSA's indexer: those of
          `indexer.loss.measure` if `measure`, otherwise only "kl" if the indexer is trained, otherwise none.

        Raises:
          ValueError: an argument has a wrong shape or dtype.
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

        def queries(q_up: Float[Array, "q_rank HD"]) -> Float[Array, "B S H D"]:
            q = product("bsi,io->bso", low_rank, q_up).reshape(*positions.shape, -1, settings.head_width)
            return rope.rotate(normalize(q, eps), positions, freqs)

        selected, indexer_means = None, {}
        if visibility.selects:  # in all stages, whose checkpoints have the same parameters
            index = Indexer(settings, eps, freqs)(x, low_rank, documents)
            teacher = indexer_loss.Heads(queries(q_up), keys, sinks)  # if unused, the compiler removes it
            selected = select(index, visibility, documents, spec.scoring) if spec.selects else None
            arguments = (index, teacher, visibility, documents, selected, spec.scoring)
            if self.measure:
                indexer_means = indexer_loss.measure(*arguments)
            elif spec.trains_indexer:
                indexer_means = {"kl": indexer_loss.loss(*arguments)}

        attend, groups = spec.attend(self.kind), settings.out_groups
        down = weight("out_down", (groups, settings.heads * settings.head_width // groups, settings.out_rank))

        def attend_heads(
            q_up: Float[Array, "q_rank HD"],
            sinks: Float32[Array, " H"] | None,
            down: Float[Array, "G group_width out_rank"],
        ) -> Float[Array, "B S G out_rank"]:
            """Some of the heads, with their parts of the parameters. Creates no parameters: it may run in a scan."""
            out = attend(queries(q_up), keys, documents, sinks=sinks, selected=selected, prepared=prepared)
            out = rope.rotate_back(out, positions, freqs).reshape(*positions.shape, *down.shape[:2])
            return product("bsgi,gir->bsgr", out, down)

        mixed = _map_heads(attend_heads, settings.heads // spec.heads_at_once, q_up, sinks, down.astype(x.dtype))
        return project("out_up", mixed.reshape(*positions.shape, -1), spec.settings.model.hidden), indexer_means


def _map_heads(
    attend_heads: Callable,
    parts: int,
    q_up: Float[Array, "q_rank HD"],
    sinks: Float32[Array, " H"] | None,
    down: Float[Array, "G group_width out_rank"],
) -> Float[Array, "B S G out_rank"]:
    """`attend_heads(q_up, sinks, down)`, computed for the heads in parts, one part after the other.

    Only the residuals `attend.SAVED` of a part are saved; the rest is recomputed in the backward pass. So little more
    than the queries and outputs of one part exist at the same time.
    """
    if parts == 1:
        return attend_heads(q_up, sinks, down)
    split = (
        jnp.moveaxis(q_up.reshape(len(q_up), parts, -1), 1, 0),
        None if sinks is None else sinks.reshape(parts, -1),
        down.reshape(parts, -1, *down.shape[1:]),
    )
    policy = jax.checkpoint_policies.save_only_these_names(*SAVED)
    rematerialized = jax.checkpoint(attend_heads, policy=policy, prevent_cse=False)  # CSE does not cross a scan
    mixed = jax.lax.map(lambda part: rematerialized(*part), split)  # [parts, B, S, G // parts, out_rank]
    mixed = jnp.moveaxis(mixed, 0, 2)
    return mixed.reshape(*mixed.shape[:2], -1, mixed.shape[-1])


def _check(x: Shaped[Array, "..."], documents: Documents, hidden: int) -> None:
    """Raises ValueError if an argument has a wrong shape or dtype."""
    if x.ndim != 3 or x.shape[-1] != hidden:
        raise ValueError(f"x: shape {list(x.shape)}, must be [B, S, {hidden}]")
    for name, array in (("positions", documents.positions), ("segments", documents.segments)):
        if array.shape != x.shape[:2] or array.dtype != jnp.int32:
            raise ValueError(f"documents.{name}: {array.dtype} {list(array.shape)}, must be int32 {list(x.shape[:2])}")
