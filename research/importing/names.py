"""Names of DeepSeek-V4's tensors. Three dialects are read; the published one is what everything else here speaks.

The others are what `save_pretrained` of Hugging Face transformers 5.24 writes, nearly the published one, and the names
of that library's modules, in which all experts of a layer are two tensors.
"""

import re
from collections.abc import Iterator

# Of both other dialects, without "model." and the layer's number, to the published ones; `.weight` stays.
_PUBLISHED = {
    "embed_tokens": "embed",
    "lm_head": "head",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "attn.norm": "attn.kv_norm",  # what save_pretrained makes of the module's kv_norm
    "self_attn.q_a_proj": "attn.wq_a",
    "self_attn.q_a_norm": "attn.q_norm",
    "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_proj": "attn.wkv",
    "self_attn.kv_norm": "attn.kv_norm",
    "self_attn.o_a_proj": "attn.wo_a",
    "self_attn.o_b_proj": "attn.wo_b",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.kv_proj": "attn.compressor.wkv",
    "self_attn.compressor.gate_proj": "attn.compressor.wgate",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.kv_norm": "attn.compressor.norm",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    "self_attn.compressor.indexer.kv_proj": "attn.indexer.compressor.wkv",
    "self_attn.compressor.indexer.gate_proj": "attn.indexer.compressor.wgate",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.kv_norm": "attn.indexer.compressor.norm",
    "mlp.gate": "ffn.gate",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.shared_experts.gate_proj": "ffn.shared_experts.w1",
    "mlp.shared_experts.up_proj": "ffn.shared_experts.w3",
    "mlp.shared_experts.down_proj": "ffn.shared_experts.w2",
}
_FUSED = {"mlp.experts.gate_up_proj": ("w1", "w3"), "mlp.experts.down_proj": ("w2",)}
_SUFFIXES = {"weight": "weight", "scale": "scale", "weight_scale_inv": "scale"}

Place = tuple[int | slice, ...]


def is_mtp(name: str) -> bool:
    """Whether a tensor is of the blocks that predict further tokens."""
    return "mtp" in name.split(".")


def published(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Place, tuple[int, ...]]]:
    """What a tensor of any dialect is in the published one.

    Args:
      name: in a file.
      shape: of what it holds.

    Yields:
      A published name, where in the tensor that is, and its shape; once, or for each expert of a layer. A name that no
      dialect has is yielded as it is.
    """
    layer, own = re.fullmatch(r"(?:model\.)?(layers\.\d+\.)?(.*)", name).groups(default="")
    if own in _FUSED and len(shape) == 3:
        parts = _FUSED[own]
        rows = shape[1] // len(parts)
        for expert in range(shape[0]):
            for i, part in enumerate(parts):
                place = (expert, slice(i * rows, (i + 1) * rows))
                yield f"{layer}ffn.experts.{expert}.{part}.weight", place, (rows, shape[2])
        return
    stem, _, suffix = own.rpartition(".")
    if own not in _PUBLISHED and suffix in _SUFFIXES:
        own = f"{_PUBLISHED.get(stem, stem)}.{_SUFFIXES[suffix]}"
    yield layer + _PUBLISHED.get(own, own), (), shape
