"""One attention layer of Hugging Face transformers' DeepSeek-V4, eager and float32, at a tiny size.

Needs requirements-parity.txt. Shared by `make_fixtures.py` and `test_live.py`.
"""

import numpy as np
import torch
from transformers.models.deepseek_v4 import configuration_deepseek_v4, modeling_deepseek_v4

from tests.parity import cases

LAYER_TYPES = {
    "sliding": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}

# Our module and parameter -> theirs. A Linear's weight is [out, in] there and [in, out] here.
_LAYER = {
    "q_down": "q_a_proj.weight",
    "q_norm/scale": "q_a_norm.weight",
    "q_up": "q_b_proj.weight",
    "kv": "kv_proj.weight",
    "kv_norm/scale": "kv_norm.weight",
    "sinks": "sinks",
    "out_down": "o_a_proj.weight",
    "out_up": "o_b_proj.weight",
}
_COMPRESSOR = {
    "values": "kv_proj.weight",
    "gates": "gate_proj.weight",
    "position_bias": "position_bias",
    "norm/scale": "kv_norm.weight",
}
_INDEXER = {"q_up": "q_b_proj.weight", "head_weights": "scorer.weights_proj.weight"}


def names(kind: str) -> dict[str, str]:
    """Our parameter names, as in `cases.flatten`, to the reference's."""
    table = {f"attention/{ours}": theirs for ours, theirs in _LAYER.items()}
    if kind != "sliding":
        table |= {f"attention/compressor/{ours}": f"compressor.{theirs}" for ours, theirs in _COMPRESSOR.items()}
    if kind == "csa":
        indexer = _INDEXER | {f"compressor/{ours}": theirs for ours, theirs in _COMPRESSOR.items()}
        table |= {f"attention/indexer/{ours}": f"compressor.indexer.{theirs}" for ours, theirs in indexer.items()}
    return table


class Reference:
    """The layer, with every parameter random, and its answers in our shapes."""

    def __init__(self, kind: str, rope, seed: int):
        config = _config(kind, rope)
        self.kind = kind
        self.rotary = modeling_deepseek_v4.DeepseekV4RotaryEmbedding(config)
        self.layer = modeling_deepseek_v4.DeepseekV4Attention(config, layer_idx=0).float()
        rng = np.random.default_rng(seed)
        for name, parameter in self.layer.named_parameters():
            draw = rng.standard_normal(parameter.shape)
            if name.endswith("norm.weight"):
                draw = 1 + 0.3 * draw
            elif name.endswith("weight"):
                draw *= parameter.shape[-1] ** -0.5
            parameter.data = torch.tensor(draw, dtype=torch.float32)
        if kind == "csa":
            self.layer.compressor.indexer.register_forward_hook(self._keep_selection)

    def parameters(self) -> cases.Arrays:
        """Weights under our names and in our layouts."""
        theirs = dict(self.layer.named_parameters())
        return {ours: self._to_ours(ours, theirs[name].detach()) for ours, name in names(self.kind).items()}

    def run(self, x: np.ndarray, cotangent: np.ndarray) -> cases.Arrays:
        """As `cases.run`, of the reference."""
        x = torch.tensor(x, requires_grad=True)
        seq_len = x.shape[1]
        positions = torch.arange(seq_len)[None]
        behind = positions.T - positions
        mask = torch.zeros(1, 1, seq_len, seq_len)
        mask = mask.masked_fill((behind < 0) | (behind >= self.layer.sliding_window), float("-inf"))
        angles = {label: self.rotary(x, positions, layer_type=label) for label in ("main", "compress")}
        self.layer.zero_grad()
        output, _ = self.layer(x, position_embeddings=angles, position_ids=positions, attention_mask=mask)
        (output * torch.tensor(cotangent)).sum().backward()
        theirs = dict(self.layer.named_parameters())
        results = {"output": output.detach().numpy(), "x": x.grad.numpy()}
        for ours, name in names(self.kind).items():
            gradient = theirs[name].grad  # None: not reached, as the indexer never is
            results[ours] = self._to_ours(ours, torch.zeros_like(theirs[name]) if gradient is None else gradient)
        return results

    def _keep_selection(self, module, arguments, picked):
        """Sets `indexer_inputs` (hidden states, low-rank query) and `selected`, bool [B, S, C].

        The reference picks indices [B, S, K], -1 standing for none.
        """
        x, low_rank_q = arguments[:2]
        self.indexer_inputs = (x.detach().numpy(), low_rank_q.detach().numpy())
        entries = x.shape[1] // module.compress_rate
        member = torch.zeros(*picked.shape[:2], entries + 1, dtype=torch.bool)
        member.scatter_(-1, torch.where(picked < 0, entries, picked), True)
        self.selected = member[..., :entries].numpy()

    def _to_ours(self, ours: str, tensor: torch.Tensor) -> np.ndarray:
        array = tensor.numpy()
        if ours == "attention/out_down":
            array = array.reshape(cases.ATTENTION.out_groups, cases.ATTENTION.out_rank, -1).swapaxes(1, 2)
        elif array.ndim == 2 and not ours.endswith("position_bias"):
            array = array.T
        return np.array(array)


def _config(kind: str, rope):
    spec = cases.ATTENTION
    partial = spec.rope_width / spec.head_width
    compress = {"rope_type": "default", "rope_theta": rope.compressed_theta, "partial_rotary_factor": partial}
    if rope.yarn_factor != 1:
        compress |= {
            "rope_type": "yarn",
            "factor": rope.yarn_factor,
            "original_max_position_embeddings": rope.yarn_original_length,
            "beta_fast": rope.yarn_beta_fast,
            "beta_slow": rope.yarn_beta_slow,
            "attention_factor": 1.0,
        }
    config = configuration_deepseek_v4.DeepseekV4Config(
        num_hidden_layers=1,
        layer_types=[LAYER_TYPES[kind]],
        mlp_layer_types=["moe"],
        hidden_size=cases.HIDDEN,
        num_attention_heads=spec.heads,
        head_dim=spec.head_width,
        partial_rotary_factor=partial,
        q_lora_rank=spec.q_rank,
        o_groups=spec.out_groups,
        o_lora_rank=spec.out_rank,
        index_n_heads=spec.index_heads,
        index_head_dim=spec.index_head_width,
        index_topk=spec.top_k,
        sliding_window=spec.window,
        compress_rates={LAYER_TYPES["csa"]: spec.csa_ratio, LAYER_TYPES["hca"]: spec.hca_ratio},
        rms_norm_eps=1e-6,
        rope_theta=rope.theta,
        compress_rope_theta=rope.compressed_theta,
        max_position_embeddings=int(rope.yarn_factor * rope.yarn_original_length),
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": rope.theta, "partial_rotary_factor": partial},
            "compress": compress,
        },
    )
    config._attn_implementation = "eager"
    return config
