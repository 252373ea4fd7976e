"""A decoder language model whose layers have different kinds of attention."""

from collections.abc import Iterable
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from research.attention.attend import Documents, Prepared
from research.attention.layer.attention import Attention
from research.attention.layer.linear import INIT_STD, project
from research.attention.layer.norms import RMSNorm
from research.attention.product import product
from research.attention.spec import Spec
from research.metrics import Mean
from research.model import streams
from research.model.feed_forward import MixtureOfExperts, feed_forward
from research.settings.model import Model

Means = dict[str, Mean]


class Output(NamedTuple):
    """What the model makes of a batch.

    Attributes:
      logits: float32 [B, S, V].
      means: by name, over all layers: indexer_..., those of `Attention`; balance, the experts' loss; of the streams
        row_error, see `streams.row_error`, and gain, their root mean square at the end by that at the start.
      loads: how many tokens each expert of a layer has, int32 [repeats, X], or [X] in the prefix, by the layer's name.
    """

    logits: jax.Array
    means: Means
    loads: dict[str, jax.Array]


def build(spec: Spec, measure: bool = False) -> hk.Transformed:
    """The model as Haiku functions.

    Args:
      spec: the model's spec.
      measure: whether to measure the selections of the indexers. Parameters and logits do not depend on it.

    Returns:
      `init(rng, inputs, documents)` and `apply(params, rng, inputs, documents)`, where inputs are int32 [B, S]. `apply`
      returns an `Output`. Parameters are float32; those of the repeated blocks have a leading axis of `model.repeats`.
    """
    settings = spec.settings.model

    def forward(inputs: Int32[Array, "B S"], documents: Documents) -> Output:
        embed = hk.Embed(
            settings.vocab_size, settings.hidden, w_init=hk.initializers.RandomNormal(INIT_STD), name="embed"
        )
        x = embed(inputs).astype(settings.dtype)
        if settings.streams > 1:
            x = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], settings.streams, x.shape[2]))
        # Computed once per step, outside the stack of blocks, and shared by the layers of a kind.
        prepared = {kind: spec.attend(kind).prepare(documents) for kind in spec.kinds}

        def layers(x: Array, named: Iterable[tuple[str, str, int]]) -> tuple[Array, tuple[list[Means], dict]]:
            """Applies blocks, given by name, kind and place among all layers."""
            means, loads = [], {}
            for name, kind, place in named:
                block = Block(spec, kind, measure, by_table=place < spec.settings.experts.hash_layers, name=name)
                apply_block = hk.remat(block) if settings.remat == "block" else block
                x, own_means, load = apply_block(x, inputs, documents, prepared[kind])
                means.append(own_means)
                loads |= {} if load is None else {name: load}
            return x, (means, loads)

        before = len(settings.prefix)
        start, prefix = x, [(f"prefix_{i}_{kind}", kind, i) for i, kind in enumerate(settings.prefix)]
        x, (prefix_means, prefix_loads) = layers(x, prefix)
        repeat = [(f"layer_{i}_{kind}", kind, before + i) for i, kind in enumerate(settings.layers)]
        # The second result is stacked over the repeats.
        stack = hk.layer_stack(settings.repeats, with_per_layer_inputs=True, name="blocks")
        x, (stack_means, stack_loads) = stack(lambda x: layers(x, repeat))(x)
        means = _over_layers([*prefix_means, *stack_means])
        if settings.streams > 1:
            means["streams_gain"] = streams.gain(start, x, documents.segments)
            x = streams.Collapse(settings)(x)
        x = RMSNorm(settings.norm_eps, name="final_norm")(x).astype(jnp.float32)
        loads = prefix_loads | stack_loads
        if settings.tied_head:
            return Output(product("bse,ve->bsv", x, embed.embeddings), means, loads)
        return Output(project("head", x, settings.vocab_size), means, loads)

    return hk.transform(forward)


def _over_layers(means: list[Means]) -> Means:
    """Sums of the means of a name, each [] or, of a stack of layers, [repeats]."""

    def total(*parts: jax.Array) -> jax.Array:
        # A stack of one shape, where all have it: in its order sums have always been taken.
        if len({part.shape for part in parts}) == 1:
            return jnp.stack(parts).sum()
        return jnp.stack([part.sum() for part in parts]).sum()

    names = dict.fromkeys(name for one in means for name in one)
    return {name: jax.tree.map(total, *(one[name] for one in means if name in one)) for name in names}


class Block(hk.Module):
    """Attention and a feed-forward layer, each with a norm at its input and a residual connection or streams."""

    def __init__(self, spec: Spec, kind: str, measure: bool, *, by_table: bool, name: str) -> None:
        """Initializes the module.

        Args:
          spec: the model's spec.
          kind: of attention.
          measure: as in `build`.
          by_table: as in `MixtureOfExperts`.
          name: the module's name.
        """
        super().__init__(name=name)
        self.spec, self.kind, self.measure, self.by_table = spec, kind, measure, by_table

    def __call__(
        self,
        x: Float[Array, "B S *streams E"],
        tokens: Int32[Array, "B S"],
        documents: Documents,
        prepared: Prepared,
    ) -> tuple[Float[Array, "B S *streams E"], Means, Int32[Array, " X"] | None]:
        """Returns the residual stream or streams after the block, in x's dtype, its means, and its experts' loads."""
        spec, settings, segments, loads = self.spec, self.spec.settings.model, documents.segments, None
        attention = _connect("attention", x, settings)
        mixed, means = Attention(spec, self.kind, self.measure)(attention.x, documents, prepared)
        means = {f"indexer_{name}": mean for name, mean in means.items()}
        ffn = _connect("ffn", attention.mix(mixed), settings)
        if spec.settings.experts.count:
            out, loads, balance = MixtureOfExperts(spec, by_table=self.by_table)(ffn.x, tokens, segments)
            means |= {} if balance is None else {"balance": balance}
        else:
            out = feed_forward(ffn.x, settings, "ffn")
        if settings.streams > 1:
            errors = [streams.row_error(connection.comb, segments) for connection in (attention, ffn)]
            means["streams_row_error"] = jax.tree.map(jnp.add, *errors)
        return ffn.mix(out), means, loads


def _connect(name: str, x: Float[Array, "B S *streams E"], settings: Model) -> streams.Connection:
    """Connects a sublayer, whose input is normalised, to the streams, or to the residual stream that it is added to."""
    norm = RMSNorm(settings.norm_eps, name=f"{name}_norm")
    if settings.streams == 1:
        return streams.Connection(norm(x), lambda out: x + out, None)
    connection = streams.HyperConnection(settings, f"{name}_streams")(x)
    return connection._replace(x=norm(connection.x))
