"""Frozen settings of the model, made once from a config; an unknown or missing field fails here."""

import dataclasses

import ml_collections

from research.attention import backends
from research.attention.spec import AttentionSpec, RopeSpec
from research.data import VOCAB_SIZE


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """See `config.model`; `vocab_size` is the data's."""

    layers: tuple[str, ...]
    repeats: int
    hidden: int
    ffn_width: int
    tied_head: bool
    norm_eps: float
    dtype: str
    remat: str
    vocab_size: int
    attention: AttentionSpec
    rope: RopeSpec


def from_config(config: ml_collections.ConfigDict) -> ModelSpec:
    """The model of a config; `backends.platform()` settles `attention.backend='auto'`."""
    attention = config.attention.to_dict()
    attention["backend"] = backends.resolve_name(attention["backend"])
    return ModelSpec(
        **config.model.to_dict(),
        vocab_size=VOCAB_SIZE,
        attention=AttentionSpec(**attention),
        rope=RopeSpec(**config.rope.to_dict()),
    )
