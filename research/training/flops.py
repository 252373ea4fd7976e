"""Floating-point operations of training, by closed formula, and the share of a chip that they make use of."""

import haiku as hk
import jax

from research.attention.visibility import HeavilyCompressed, SlidingWindow, visible_pairs
from research.measure import chips
from research.model.spec import ModelSpec

# Parameters that no matrix product reads.
_NOT_MULTIPLIED = ("scale", "sinks", "position_bias")


def per_token(spec: ModelSpec, seq_len: int, params: hk.Params) -> float:
    """FLOPs of forward and backward pass for a token in a row that is one document.

    6 for every parameter that the token is multiplied with, and 12 times heads times head width for every key that it
    sees: two products forward and four backward, recomputation not counted (PaLM, arXiv 2204.02311, appendix B, with
    the pairs that are visible in place of all). The indexer counts forward alone, for the language model's loss gives
    it no gradient. Packed documents see fewer keys; norms, RoPE, softmax and pooling are left out.

    Args:
      spec: the model.
      seq_len: tokens per row.
      params: its parameters, or their shapes.
    """
    flops = 0.0
    for module, name, value in hk.data_structures.traverse(params):
        looked_up = name == "embeddings" and not spec.tied_head
        if name not in _NOT_MULTIPLIED and not looked_up:
            flops += (2 if "/indexer" in module else 6) * value.size
    attention = spec.attention
    for kind in spec.layers:
        visibility = attention.visibility(kind)
        pairs = visible_pairs(visibility, seq_len) / seq_len
        flops += spec.repeats * 12 * pairs * attention.heads * attention.head_width
        if kind == "csa":
            entries = HeavilyCompressed(visibility.window, visibility.ratio)
            scored = visible_pairs(entries, seq_len) - visible_pairs(SlidingWindow(visibility.window), seq_len)
            flops += spec.repeats * 2 * scored / seq_len * attention.index_heads * attention.index_head_width
    return flops


def utilisation(flops_per_second: float) -> dict[str, float]:
    """Model FLOPs utilisation as `mfu`: over the bfloat16 peak of all devices; empty where that is not known."""
    chip = chips.of_device(jax.devices()[0].device_kind)
    return {} if chip is None else {"mfu": mfu(flops_per_second, chip.flops * jax.device_count())}


def mfu(flops_per_second: float, peak: float) -> float:
    """The share of the peak, both in FLOP/s."""
    return flops_per_second / peak
