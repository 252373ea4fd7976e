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


def from_config(
    config: ml_collections.ConfigDict, platform: str | None = None, *, checks_memory: bool = True
) -> ModelSpec:
    """The model of a config, for a platform or, by default, this process's own; see `backends.Target`.

    The platform settles what 'auto' chooses, and which kernels are interpreted.
    """
    attention = config.attention.to_dict()
    target = backends.target(platform, checks_memory=checks_memory)
    attention["backend"] = backends.resolve_name(attention["backend"], target.platform)
    return ModelSpec(
        **config.model.to_dict(),
        vocab_size=VOCAB_SIZE,
        attention=AttentionSpec(**attention, target=target),
        rope=RopeSpec(**config.rope.to_dict()),
    )
