"""Hugging Face transformers' whole DeepSeek-V4, eager and float32, at a tiny size; needs requirements-parity.txt.

Every parameter is random, those too that start at 0, for zeros hide errors; gates of the experts are large enough for
their limit to show, and both epsilons for it to show which is used where.
"""

import pathlib

import numpy as np
import torch
from safetensors.torch import save_file
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 5,
    "compress_ratios": [0, 4, 128, 4, 128, 0],  # the last is of a block that predicts further tokens
    "num_hash_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 8,
    "o_groups": 2,
    "o_lora_rank": 6,
    "index_n_heads": 16,  # with fewer many scores are 0, and ties are broken at will
    "index_head_dim": 12,
    "index_topk": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-2,
    "hc_eps": 1e-3,
    "max_position_embeddings": 1024,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
_GATE = 6.0  # of the experts' matrices, by what keeps the size of hidden states


class Whole:
    """The model, and what it answers."""

    def __init__(self, seed: int, **sizes):
        config = DeepseekV4Config(**{**SIZES, **sizes})
        config._attn_implementation = "eager"
        self.model = DeepseekV4ForCausalLM(config).float()
        self.model.set_experts_implementation("eager")
        rng = np.random.RandomState(seed)
        for name, parameter in self.model.named_parameters():
            draw = rng.standard_normal(parameter.shape)
            if name.endswith("norm.weight"):
                draw = 1 + 0.3 * draw
            elif parameter.ndim > 1 and not name.endswith("position_bias"):
                draw *= parameter.shape[-1] ** -0.5
            if "experts.gate" in name or "experts.up" in name:
                draw *= _GATE
            parameter.data = torch.tensor(draw, dtype=torch.float32)
        for name, buffer in self.model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor(0.3 * rng.standard_normal(buffer.shape)))
            elif name.endswith("tid2eid"):
                experts, (vocab, chosen) = config.n_routed_experts, buffer.shape
                buffer.copy_(torch.tensor(np.stack([rng.permutation(experts)[:chosen] for _ in range(vocab)])))

    def save(self, folder: pathlib.Path) -> None:
        """Writes config.json and the weights."""
        self.model.save_pretrained(folder)

    def run(self, tokens: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
        """The logits; the gradients of `sum(logits * cotangent)` stay with the parameters."""
        self.model.zero_grad()
        logits = self.model(input_ids=torch.tensor(tokens)).logits
        (logits * torch.tensor(cotangent)).sum().backward()
        return logits.detach().numpy()

    def save_gradients(self, folder: pathlib.Path) -> None:
        """Writes them under the names of the modules; indexers have none."""
        folder.mkdir(parents=True, exist_ok=True)
        found = {n: p.grad.contiguous() for n, p in self.model.named_parameters() if p.grad is not None}
        save_file(found, folder / "gradients.safetensors")

    def share_beyond(self, tokens: np.ndarray) -> float:
        """Of the shared experts' gates, the share beyond their limit."""
        found = []

        def look(module, inputs, output):
            found.append((output > self.model.config.swiglu_limit).float().mean().item())

        hooks = [layer.mlp.shared_experts.gate_proj.register_forward_hook(look) for layer in self.model.model.layers]
        with torch.no_grad():
            self.model(input_ids=torch.tensor(tokens))
        for hook in hooks:
            hook.remove()
        return float(np.mean(found))


def loaded(folder: pathlib.Path) -> DeepseekV4ForCausalLM:
    """The model of a checkpoint, every tensor of which must have its place."""
    model, told = DeepseekV4ForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not any(told.values()), told
    return model.float()


def logits(model: DeepseekV4ForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """Float32 [B, S, V]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens)).logits.numpy()
