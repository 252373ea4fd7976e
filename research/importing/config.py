"""The config.json of a DeepSeek-V4 checkpoint as settings, and back. Imports nothing heavy.

Read are the published form and that of Hugging Face transformers 5.24, which is written. A field that decides about the
model and is missing is an error: the library's defaults are those of one released model.
"""

import json
import pathlib
from typing import Any

from research.errors import ConfigError
from research.settings.config import Settings, is_idle
from research.settings.fields import Overrides

CONFIG = "config.json"
MODEL_TYPE = "deepseek_v4"
_KINDS = {"sliding": "sliding_attention", "csa": "compressed_sparse_attention", "hca": "heavily_compressed_attention"}
_OF_RATIO = {0: "sliding", 4: "csa", 128: "hca"}  # of compress_ratios, which chooses the kind and nothing else
_HASH, _BY_SCORE = "hash_moe", "moe"
_FIELDS = {
    "vocab_size": "model.vocab_size",
    "hidden_size": "model.hidden",
    "moe_intermediate_size": "model.ffn_width",
    "swiglu_limit": "model.swiglu_limit",
    "hc_mult": "model.streams",
    "hc_sinkhorn_iters": "model.sinkhorn_rounds",
    "hc_eps": "model.streams_eps",
    "rms_norm_eps": "model.norm_eps",
    "n_routed_experts": "experts.count",
    "num_experts_per_tok": "experts.per_token",
    "routed_scaling_factor": "experts.scale",
    "sliding_window": "attention.window",
    "index_topk": "attention.top_k",
    "num_attention_heads": "attention.heads",
    "head_dim": "attention.head_width",
    "q_lora_rank": "attention.q_rank",
    "o_groups": "attention.out_groups",
    "o_lora_rank": "attention.out_rank",
    "index_n_heads": "attention.index_heads",
    "index_head_dim": "attention.index_head_width",
}
_YARN = {
    "factor": "rope.yarn_factor",
    "original_max_position_embeddings": "rope.yarn_original_length",
    "beta_fast": "rope.yarn_beta_fast",
    "beta_slow": "rope.yarn_beta_slow",
}
# What a checkpoint may not differ in, where it says anything about it: the model has no other way.
_FIXED = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


class _Fields(dict):
    """Of a config.json; asked for one that is missing, names it."""

    def __missing__(self, name: str) -> Any:
        raise ConfigError(f"{CONFIG}: lacks {name}")


def read(folder: pathlib.Path) -> Overrides:
    """Settings that the model of a checkpoint has, of `folder/config.json`.

    Raises:
      ConfigError: there is none, it lacks a field, or it is another model's.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{folder}: holds no {CONFIG}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from error
    return overrides(config)


def overrides(config: dict[str, Any]) -> Overrides:
    """`read` of what the file says."""
    if config.get("model_type") != MODEL_TYPE:
        raise ConfigError(f"{CONFIG}: model_type={config.get('model_type')!r}: must be {MODEL_TYPE!r}")
    for name, value in _FIXED.items():
        if name in config and config[name] != value:
            raise ConfigError(f"{CONFIG}: {name}={config[name]!r}: must be {value!r}")
    fields = _Fields(config)
    found = {setting: fields[name] for name, setting in _FIELDS.items()}
    found["model.tied_head"] = config.get("tie_word_embeddings", False)
    kinds, hashed = _kinds(fields), _hash_layers(fields)
    prefix, layers = stack(kinds, hashed)
    found |= {"model.prefix": prefix, "model.layers": layers, "experts.hash_layers": hashed}
    found["model.repeats"] = (len(kinds) - len(prefix)) // len(layers)
    rates = config.get("compress_rates") or {}
    for kind, ratio in (("csa", 4), ("hca", 128)):
        found[f"attention.{kind}_ratio"] = rates.get(_KINDS[kind], config.get(f"compress_rate_{kind}", ratio))
    return _typed(found | _rope(fields, found["attention.head_width"]), kinds)


def stack(kinds: tuple[str, ...], hashed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The prefix and the repeated layers that make a list of kinds, as few of both as can be.

    Args:
      kinds: of all layers.
      hashed: how many of the first ones are hash layers, which are not repeated.
    """
    found = []
    for before in range(hashed, len(kinds)):
        rest = kinds[before:]
        for period in range(1, len(rest) + 1):
            if len(rest) % period == 0 and rest[:period] * (len(rest) // period) == rest:
                found.append((before + period, before, period))
                break
    # Hash layers may be the whole model: then nothing is repeated.
    _, before, period = min(found, default=(0, 0, len(kinds)))
    return kinds[:before], kinds[before : before + period]


def write(settings: Settings, dtype: str) -> dict[str, Any]:
    """The config.json of a model, as transformers reads it.

    Raises:
      ConfigError: the model is none that it can describe.
    """
    model, experts, attention, rope = settings.model, settings.experts, settings.attention, settings.rope
    if not experts.count:
        raise experts.error("count", "positive: each layer of DeepSeek-V4 has experts")
    if model.streams == 1:
        raise model.error("streams", "more than 1, as DeepSeek-V4 has them")
    if not experts.shared:
        raise experts.error("shared", "1, as DeepSeek-V4 has it")
    if not model.swiglu_limit:
        raise model.error("swiglu_limit", "positive: 0 would let nothing through there")
    if not attention.sinks:
        raise attention.error("sinks", "True, as DeepSeek-V4 has them")
    config = {name: _value(settings, setting) for name, setting in _FIELDS.items()}
    partial = attention.rope_width / attention.head_width
    yarn = {name: _value(settings, setting) for name, setting in _YARN.items()}
    compress = {"rope_type": "yarn", **yarn, "attention_factor": 1.0}
    return config | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": dtype,
        **_FIXED,
        "tie_word_embeddings": model.tied_head,
        "num_hidden_layers": len(model.all_layers),
        "layer_types": [_KINDS[kind] for kind in model.all_layers],
        "mlp_layer_types": [
            _HASH if layer < experts.hash_layers else _BY_SCORE for layer in range(len(model.all_layers))
        ],
        "compress_rates": {_KINDS["csa"]: attention.csa_ratio, _KINDS["hca"]: attention.hca_ratio},
        "qk_rope_head_dim": attention.rope_width,
        "partial_rotary_factor": partial,
        "max_position_embeddings": int(rope.yarn_factor * rope.yarn_original_length),
        "rope_theta": rope.theta,
        "compress_rope_theta": rope.compressed_theta,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": rope.theta, "partial_rotary_factor": partial},
            "compress": {
                **({"rope_type": "default"} if rope.yarn_factor == 1 else compress),
                "rope_theta": rope.compressed_theta,
                "partial_rotary_factor": partial,
            },
        },
    }


def _kinds(fields: _Fields) -> tuple[str, ...]:
    count = fields["num_hidden_layers"]
    if fields.get("layer_types"):
        names = {name: kind for kind, name in _KINDS.items()}
        listed = fields["layer_types"]
    else:
        names, listed = _OF_RATIO, fields["compress_ratios"]
    if unknown := [name for name in listed if name not in names]:
        raise ConfigError(f"{CONFIG}: layers are {unknown[0]!r}; must be among {', '.join(map(repr, names))}")
    if len(listed) < count:
        raise ConfigError(f"{CONFIG}: has {len(listed)} kinds for num_hidden_layers={count}")
    return tuple(names[name] for name in listed[:count])  # what follows is of the blocks that predict further tokens


def _hash_layers(fields: _Fields) -> int:
    if "mlp_layer_types" not in fields:
        return fields["num_hash_layers"]
    listed = fields["mlp_layer_types"]
    hashed = listed.count(_HASH)
    if listed != [_HASH] * hashed + [_BY_SCORE] * (len(listed) - hashed):
        raise ConfigError(f"{CONFIG}: mlp_layer_types={listed}: must be {_HASH} first, {_BY_SCORE} after them")
    return hashed


def _rope(fields: _Fields, head_width: int) -> Overrides:
    """Settings of rotary position embedding, of one dict for each of two uses, or of one for both."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    main, compress = given.get("main", {}), given.get("compress", given)
    width = fields.get("qk_rope_head_dim")
    if width is None:
        width = round(fields["partial_rotary_factor"] * head_width)
    found = {
        "attention.rope_width": width,
        "rope.theta": main.get("rope_theta", fields.get("rope_theta")),
        "rope.compressed_theta": compress.get("rope_theta", fields.get("compress_rope_theta")),
        "rope.angles": "reference",
    }
    kind = compress.get("rope_type", compress.get("type", "default"))
    if kind == "yarn":
        found |= {setting: _Fields(compress)[name] for name, setting in _YARN.items()}
    elif kind != "default":
        raise ConfigError(f"{CONFIG}: rope_type={kind!r}: must be 'default' or 'yarn'")
    return found


def _value(settings: Settings, name: str) -> Any:
    group, field = name.split(".")
    return getattr(getattr(settings, group), field)


def _typed(found: Overrides, kinds: tuple[str, ...]) -> Overrides:
    """With the types of the settings, and without those that no layer reads."""
    result, yarn = {}, set(_YARN.values()) if is_idle("rope.yarn_factor", kinds) else ()
    for name, value in found.items():
        default = _value(Settings(), name)
        if isinstance(default, float) and isinstance(value, int):
            value = float(value)
        if isinstance(default, bool) is not isinstance(value, bool) or not isinstance(value, type(default)):
            raise ConfigError(f"{CONFIG}: {name}={value!r}: must be of type {type(default).__name__}")
        if not is_idle(name, kinds) and name not in yarn:
            result[name] = value
    return result
