"""A decoder language model whose layers differ in their attention's visibility."""

import haiku as hk
import jax
import jax.numpy as jnp

from research.attention import backends
from research.attention.layer import Attention
from research.attention.linear import INIT_STD, project
from research.attention.norms import RMSNorm
from research.model.spec import ModelSpec

REMAT = ("none", "block")


def build(spec: ModelSpec) -> hk.Transformed:
    """The model as Haiku functions.

    Args:
      spec: `research.model.spec.from_config`.

    Returns:
      `init(rng, inputs, positions, segments)` and `apply(params, rng, inputs, positions, segments)`, where all three
      are int32 [B, S], segments may be None, and apply returns float32 logits [B, S, vocab_size]. Parameters are
      float32; those of the repeated block carry a leading axis of `spec.repeats`.
    """

    def forward(inputs: jax.Array, positions: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        embed = hk.Embed(spec.vocab_size, spec.hidden, w_init=hk.initializers.RandomNormal(INIT_STD), name="embed")
        x_BxSxE = embed(inputs).astype(spec.dtype)
        attention, backend = spec.attention, backends.get(spec.attention.backend)
        # Once per step, outside the stack of blocks: what layers of one kind share.
        prepared = {
            kind: backend.prepare(attention.visibility(kind), inputs.shape[1], segments, attention.options(kind))
            for kind in dict.fromkeys(spec.layers)
        }

        def block(x_BxSxE):
            for index, kind in enumerate(spec.layers):
                layer = Layer(spec, kind, name=f"layer_{index}_{kind}")
                run = hk.remat(layer) if spec.remat == "block" else layer
                x_BxSxE = run(x_BxSxE, positions, segments, prepared[kind])
            return x_BxSxE

        x_BxSxE = hk.layer_stack(spec.repeats, name="blocks")(block)(x_BxSxE)
        x_BxSxE = RMSNorm(spec.norm_eps, name="final_norm")(x_BxSxE)
        if spec.tied_head:
            return jnp.einsum("bse,ve->bsv", x_BxSxE.astype(jnp.float32), embed.embeddings)
        return project("head", x_BxSxE.astype(jnp.float32), spec.vocab_size)

    return hk.transform(forward)


class Layer(hk.Module):
    """Attention and SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, spec: ModelSpec, kind: str, name: str):
        super().__init__(name=name)
        self.spec = spec
        self.kind = kind

    def __call__(
        self, x_BxSxE: jax.Array, positions: jax.Array, segments: jax.Array | None, prepared: jax.Array | None
    ) -> jax.Array:
        """[B, S, E] to [B, S, E] in the same dtype; see `build`, and `backends.Backend.prepare`."""
        spec = self.spec
        attention = Attention(spec.attention, spec.rope, self.kind, spec.hidden, spec.norm_eps, spec.dtype)
        x_BxSxE += attention(RMSNorm(spec.norm_eps, name="attention_norm")(x_BxSxE), positions, segments, prepared)
        normed = RMSNorm(spec.norm_eps, name="ffn_norm")(x_BxSxE)
        gated = jax.nn.silu(project("ffn_gate", normed, spec.ffn_width)) * project("ffn_up", normed, spec.ffn_width)
        return x_BxSxE + project("ffn_down", gated, spec.hidden)
