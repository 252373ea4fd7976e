"""A decoder language model whose layers have different kinds of attention."""

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from research.attention.attend import Documents, Prepared
from research.attention.layer.attention import Attention
from research.attention.layer.linear import INIT_STD, project
from research.attention.layer.norms import RMSNorm
from research.attention.product import product
from research.attention.spec import Spec
from research.data import VOCAB_SIZE
from research.metrics import Mean


def build(spec: Spec, measure: bool = False) -> hk.Transformed:
    """The model as Haiku functions.

    Args:
      spec: the model's spec.
      measure: whether to measure the selections of the indexers. Parameters and logits do not depend on it.

    Returns:
      `init(rng, inputs, documents)` and `apply(params, rng, inputs, documents)`, where inputs are int32 [B, S]. `apply`
      returns float32 logits [B, S, V], and the means of `Attention` over all layers. Parameters are float32; those of
      the repeated blocks have a leading axis of `model.repeats`.
    """
    settings = spec.settings.model

    def forward(inputs: Int32[Array, "B S"], documents: Documents) -> tuple[Float32[Array, "B S V"], dict[str, Mean]]:
        embed = hk.Embed(VOCAB_SIZE, settings.hidden, w_init=hk.initializers.RandomNormal(INIT_STD), name="embed")
        x = embed(inputs).astype(settings.dtype)
        # Computed once per step, outside the stack of blocks, and shared by the layers of a kind.
        prepared = {kind: spec.attend(kind).prepare(documents) for kind in spec.kinds}

        def repeat(x: Float[Array, "B S E"]) -> tuple[Float[Array, "B S E"], list[dict[str, Mean]]]:
            all_means = []
            for index, kind in enumerate(settings.layers):
                block = Block(spec, kind, measure, name=f"layer_{index}_{kind}")
                apply_block = hk.remat(block) if settings.remat == "block" else block
                x, indexer_means = apply_block(x, documents, prepared[kind])
                if indexer_means:
                    all_means.append(indexer_means)
            return x, all_means

        # The second result of `repeat` is stacked over the repeats.
        stack = hk.layer_stack(settings.repeats, with_per_layer_inputs=True, name="blocks")
        x, all_means = stack(repeat)(x)
        all_means = jax.tree.map(lambda *x: jnp.stack(x).sum(), *all_means) if all_means else {}
        x = RMSNorm(settings.norm_eps, name="final_norm")(x).astype(jnp.float32)
        if settings.tied_head:
            return product("bse,ve->bsv", x, embed.embeddings), all_means
        return project("head", x, VOCAB_SIZE), all_means

    return hk.transform(forward)


class Block(hk.Module):
    """Attention and a SwiGLU feed-forward layer, each with a norm at its input and a residual connection."""

    def __init__(self, spec: Spec, kind: str, measure: bool, name: str) -> None:
        super().__init__(name=name)
        self.spec, self.kind, self.measure = spec, kind, measure

    def __call__(
        self, x: Float[Array, "B S E"], documents: Documents, prepared: Prepared
    ) -> tuple[Float[Array, "B S E"], dict[str, Mean]]:
        """Returns the residual stream after the block, in x's dtype, and the second result of `Attention`."""
        settings = self.spec.settings.model
        normed = RMSNorm(settings.norm_eps, name="attention_norm")(x)
        mixed, indexer_means = Attention(self.spec, self.kind, self.measure)(normed, documents, prepared)
        x += mixed
        normed = RMSNorm(settings.norm_eps, name="ffn_norm")(x)
        width = settings.ffn_width
        gated = jax.nn.silu(project("ffn_gate", normed, width)) * project("ffn_up", normed, width)
        return x + project("ffn_down", gated, settings.hidden), indexer_means
