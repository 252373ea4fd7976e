"""A decoder language model whose layers differ in their attention's visibility."""

import haiku as hk
import jax
import jax.numpy as jnp

from research.attention import backends
from research.attention.layer.attention import Attention
from research.attention.layer.linear import INIT_STD, project
from research.attention.layer.norms import RMSNorm
from research.attention.product import product
from research.metrics import Mean
from research.model.spec import ModelSpec

REMAT = ("none", "block")


def build(spec: ModelSpec, measure: bool = False) -> hk.Transformed:
    """The model as Haiku functions.

    Args:
      spec: `research.model.spec.from_config`.
      measure: whether to measure what the indexers select, too; parameters and logits do not depend on it.

    Returns:
      `init(rng, inputs, positions, segments)` and `apply(params, rng, inputs, positions, segments)`, where all three
      are int32 [B, S], segments may be None, and apply returns float32 logits [B, S, vocab_size] and what `Attention`
      says of the indexers, as means over all layers. Parameters are float32; those of the repeated block carry a
      leading axis of `spec.repeats`.
    """

    def forward(
        inputs: jax.Array, positions: jax.Array, segments: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, Mean]]:
        embed = hk.Embed(spec.vocab_size, spec.hidden, w_init=hk.initializers.RandomNormal(INIT_STD), name="embed")
        x_BxSxE = embed(inputs).astype(spec.dtype)
        attention, backend = spec.attention, backends.get(spec.attention.backend)
        # Once per step, outside the stack of blocks: what layers of one kind share.
        prepared = {
            kind: backend.prepare(attention.visibility(kind), inputs.shape[1], segments, attention.options(kind))
            for kind in dict.fromkeys(spec.layers)
        }

        def block(x_BxSxE):
            of_indexers = []
            for index, kind in enumerate(spec.layers):
                layer = Layer(spec, kind, measure, name=f"layer_{index}_{kind}")
                run = hk.remat(layer) if spec.remat == "block" else layer
                x_BxSxE, of_indexer = run(x_BxSxE, positions, segments, prepared[kind])
                if of_indexer:
                    of_indexers.append(of_indexer)
            return x_BxSxE, of_indexers

        # The second result comes back stacked, an entry for each repeat.
        stack = hk.layer_stack(spec.repeats, with_per_layer_inputs=True, name="blocks")
        x_BxSxE, of_indexers = stack(block)(x_BxSxE)
        of_indexers = jax.tree.map(lambda *x: jnp.stack(x).sum(), *of_indexers) if of_indexers else {}
        x_BxSxE = RMSNorm(spec.norm_eps, name="final_norm")(x_BxSxE)
        if spec.tied_head:
            return product("bse,ve->bsv", x_BxSxE.astype(jnp.float32), embed.embeddings), of_indexers
        return project("head", x_BxSxE.astype(jnp.float32), spec.vocab_size), of_indexers

    return hk.transform(forward)


class Layer(hk.Module):
    """Attention and SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, spec: ModelSpec, kind: str, measure: bool, name: str):
        super().__init__(name=name)
        self.measure = measure
        self.spec = spec
        self.kind = kind

    def __call__(
        self, x_BxSxE: jax.Array, positions: jax.Array, segments: jax.Array | None, prepared: jax.Array | None
    ) -> tuple[jax.Array, dict[str, Mean]]:
        """[B, S, E] to [B, S, E] in the same dtype, and `Attention`'s second result; see `backends.Backend.prepare`."""
        spec = self.spec
        attention = Attention(
            spec.attention, spec.rope, self.kind, spec.hidden, spec.norm_eps, spec.dtype, self.measure
        )
        normed = RMSNorm(spec.norm_eps, name="attention_norm")(x_BxSxE)
        mixed, of_indexer = attention(normed, positions, segments, prepared)
        x_BxSxE += mixed
        normed = RMSNorm(spec.norm_eps, name="ffn_norm")(x_BxSxE)
        gated = jax.nn.silu(project("ffn_gate", normed, spec.ffn_width)) * project("ffn_up", normed, spec.ffn_width)
        return x_BxSxE + project("ffn_down", gated, spec.hidden), of_indexer
