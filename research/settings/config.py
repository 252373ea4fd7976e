"""All settings together; the ConfigDict that command lines override is made from them, and read back into them."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import ml_collections

from research.settings.attention import Attention, Rope
from research.settings.group import Allowed, Group, setting
from research.settings.model import Data, Experts, Model
from research.settings.running import Aot, Bench, Distributed, Run, Wandb
from research.settings.training import Optimizer, Profile, Train

WARM_UP_STEPS = 2  # after which steps are timed and traced: the first ones fill caches and allocators
_MOST_SEED = 2**32 - 1  # JAX makes its first key from 32 bits of an integer, without a word about the others


@dataclasses.dataclass(frozen=True)
class Settings(Group):
    """A whole config, by default a small DeepSeek-V4-like language model on bytes, sized for a laptop.

    Integers use 0 for "unset"; no field is None, which could not be overridden.
    """

    seed: int = setting(
        0,
        "of parameters and data orders",
        Allowed(
            lambda seed: type(seed) is int and 0 <= seed <= _MOST_SEED,
            f"an integer from 0 to {_MOST_SEED}, of which no two make the same numbers",
        ),
    )
    model: Model = dataclasses.field(default_factory=Model)
    experts: Experts = dataclasses.field(default_factory=Experts)
    attention: Attention = dataclasses.field(default_factory=Attention)
    rope: Rope = dataclasses.field(default_factory=Rope)
    data: Data = dataclasses.field(default_factory=Data)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    train: Train = dataclasses.field(default_factory=Train)
    profile: Profile = dataclasses.field(default_factory=Profile)
    distributed: Distributed = dataclasses.field(default_factory=Distributed)
    bench: Bench = dataclasses.field(default_factory=Bench)
    aot: Aot = dataclasses.field(default_factory=Aot)
    run: Run = dataclasses.field(default_factory=Run)
    wandb: Wandb = dataclasses.field(default_factory=Wandb)

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds, attention = set(self.model.kinds), self.attention
        for field in dataclasses.fields(attention):
            kind = field.metadata["only"]
            if kind and kind not in kinds and not attention.is_default(field.name):
                raise attention.error(field.name, f"left at {field.default!r}: model.layers has no {kind} layer")
        if kinds == {"csa"} and not attention.is_default("schedule"):
            raise attention.error("schedule", "auto: model.layers has only csa layers, whose schedule is csa_schedule")
        self._check_experts()
        if self.data.batch_size % self.train.accumulate:
            raise self.train.error("accumulate", f"a divisor of data.batch_size={self.data.batch_size}")
        steps = self.train.steps
        if self.optimizer.warmup_steps >= steps:
            raise self.optimizer.error("warmup_steps", f"below train.steps={steps}")
        if self.profile.steps > max(0, steps - WARM_UP_STEPS):
            raise self.profile.error("steps", f"from 0 to train.steps={steps} less {WARM_UP_STEPS} for warming up")

    def _check_experts(self) -> None:
        """Raises SettingError where the layers of experts are not those of the model."""
        experts, model = self.experts, self.model
        # What is stacked is one program, which gets its tokens' experts in one way.
        apart = len(model.prefix) + (len(model.layers) if model.repeats == 1 else 0)
        if experts.hash_layers > apart:
            where = "model.prefix" if model.repeats > 1 else "model.prefix and model.layers"
            raise experts.error("hash_layers", f"from 0 to {apart}, the layers of {where}")
        if experts.count and experts.hash_layers == len(model.all_layers):
            for name in ("balance_rate", "balance_weight"):
                if not experts.is_default(name):
                    raise experts.error(name, f"left at {experts.default(name)!r}: all layers are hash layers")

    def replace(self, **changes: dict[str, Any]) -> "Settings":
        """With other values of some groups' fields: `replace(attention={"block_q": 128})`."""
        groups = {name: dataclasses.replace(getattr(self, name), **fields) for name, fields in changes.items()}
        return dataclasses.replace(self, **groups)

    def refuse_idle(self, names: Iterable[str]) -> None:
        """Raises SettingError for a field among these, of dotted names, that was set and that no layer reads."""
        for name in names:
            group, _, field = name.rpartition(".")
            settings = getattr(self, group) if group else self
            if is_idle(name, self.model.kinds) and not settings.is_default(field):
                kinds = " or ".join(type(settings).__dataclass_fields__[field].metadata["kinds"])
                words = f"left at {settings.default(field)!r}: model.layers has no {kinds} layer"
                raise settings.error(field, words)

    def for_kind(self, kind: str) -> "Settings":
        """Of one layer's attention of that kind alone: what the others alone would read has its default."""
        attention = self.attention
        idle = [field.name for field in dataclasses.fields(attention) if field.metadata["only"] not in ("", kind)]
        if kind == "csa":
            idle.append("schedule")
        alone = dataclasses.replace(self, experts=Experts())
        return alone.replace(
            model={"prefix": (), "layers": (kind,), "repeats": 1},
            attention={name: attention.default(name) for name in idle},
        )


def groups() -> Iterator[tuple[str, type[Group]]]:
    """Name and class of every group."""
    for field in dataclasses.fields(Settings):
        if field.default_factory is not dataclasses.MISSING:
            yield field.name, field.default_factory


def is_idle(name: str, layers: tuple[str, ...]) -> bool:
    """Whether none of these kinds of layers reads the field of that dotted name."""
    group, _, field = name.rpartition(".")
    if not group:
        return False
    kinds = dict(groups())[group].__dataclass_fields__[field].metadata["kinds"]
    return bool(kinds) and not set(kinds) & set(layers)


def base_config() -> ml_collections.ConfigDict:
    """The defaults as a config; locked, so that a misspelled field fails."""
    return as_config(Settings())


def as_config(settings: Settings) -> ml_collections.ConfigDict:
    """Settings as a config, locked."""
    return ml_collections.ConfigDict(dataclasses.asdict(settings)).lock()


def from_json(given: dict[str, Any]) -> Settings:
    """The inverse of `fields.as_json`; what is left out has its default.

    Raises:
      SettingError: as `read`.
    """
    config = base_config()
    for name, value in given.items():
        if isinstance(value, dict):
            config[name].update({field: tuple(v) if isinstance(v, list) else v for field, v in value.items()})
        else:
            config[name] = value
    return read(config)


def read(config: ml_collections.ConfigDict) -> Settings:
    """The settings of a full config.

    Raises:
      SettingError: a value is not allowed, alone or beside the others.
    """
    made = {name: cls(**config[name].to_dict()) for name, cls in groups()}
    return Settings(seed=config.seed, **made)
