"""What do mask strategies, block sizes and dq_reduction_steps change inside the whole DeepSeek-V4 model?

    python launch/sweep.py --config=experiments/deepseek_v4.py:demo
    python launch/train.py --config=experiments/deepseek_v4.py:flash --dry_run
    python launch/train.py --config=experiments/deepseek_v4.py:FOLDER --config.train.start_from=ID

`:flash` and `:pro` have the published sizes, 284 and 1,600 billion parameters; to train them takes many chips, but
`--dry_run` tells their shapes, FLOPs and memory. `:tiny` has their every part, sized for two CPU cores, and `:demo` is
the same for a few steps. A FOLDER with a config.json is the model that it describes, as `launch/import_weights.py`
makes a run of its weights. Without an argument it is `:tiny` of a size for an accelerator.
"""

import pathlib
from typing import Any

import ml_collections

from research.importing import config as published
from research.settings.config import base_config
from research.settings.fields import override
from research.sweeps import cross, experiment

ARGS = ("", "demo", "tiny", "flash", "pro")
HEADLINE = ("val_bits_per_byte", "step_seconds", "temp_bytes")

# config.json of DeepSeek-V4-Flash and -Pro, as far as it describes the model.
_FLASH = {
    "model_type": published.MODEL_TYPE,
    "vocab_size": 129_280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4],
    "num_hash_layers": 3,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "compress_rope_theta": 1.6e5,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65_536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
_PRO = _FLASH | {
    "hidden_size": 7168,
    "moe_intermediate_size": 3072,
    "num_hidden_layers": 61,
    "compress_ratios": [128, *[128, 4] * 30],
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.5,
}
_TINY = _FLASH | {
    "vocab_size": 257,
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "compress_ratios": [0, 0, 4, 128, 4],
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
}
_SMALL = _TINY | {  # for an accelerator
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 512,
    "o_groups": 4,
    "o_lora_rank": 256,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
}
_MODELS: dict[str, dict[str, Any]] = {"": _SMALL, "demo": _TINY, "tiny": _TINY, "flash": _FLASH, "pro": _PRO}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    """The model of a preset, or of a folder with a config.json."""
    if pathlib.Path(arg).expanduser().is_dir() and arg:
        model = published.read(pathlib.Path(arg).expanduser())
    else:
        experiment.check_arg(arg, ARGS)
        model = published.overrides(_MODELS[arg])
    config = base_config()
    override(config, model)
    config.optimizer.warmup_steps = 2
    if arg in ("demo", "tiny"):
        config.data.batch_size = 1
        config.train.steps = 6 if arg == "demo" else 300
        config.train.eval_batches = 1 if arg == "demo" else 8
    else:
        config.model.dtype = "bfloat16"
        config.model.remat = "block"
        config.data.seq_len = 8192
        config.data.batch_size = 1
        config.train.steps = 100
    return config


def sweep(arg: str = "") -> list[experiment.Overrides]:
    """The cross; the demo has one size of blocks more than the least."""
    config = get_config(arg)
    sizes = (128, 256) if arg in ("demo", "tiny") else (512, 1024)
    return cross.points(config, [{}], sizes, ("static", "dynamic", "hybrid"), unscheduled=True)
