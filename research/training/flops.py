"""Floating-point operations of training, by closed formula, and the share of a chip that they make use of."""

import haiku as hk
import jax

from research import hardware
from research.attention.spec import Spec
from research.attention.visibility import SlidingWindow
from research.model.feed_forward import is_routed
from research.model.router import UNTRAINED
from research.training.optimizer import group

# Parameters that no matrix product reads.
_NOT_MULTIPLIED = ("scale", "sinks", "position_bias", "bias", *UNTRAINED)


def per_token(spec: Spec, params: hk.Params) -> float:
    """FLOPs of forward and backward pass for a token in a row that is one document.

    6 for every parameter that the token is multiplied with, and 12 times heads times head width for every key that it
    sees: two products forward and four backward, recomputation not counted (PaLM, arXiv 2204.02311, appendix B, with
    the pairs that are visible in place of all). A third of it for what CSA's stage does not train, nothing for an
    indexer that it does not ask. An indexer scores every entry that is complete; its loss is over the entries that a
    token attends, so it takes twice as much again for those alone, the selected ones in the sparse stage, and the
    heads' product with them. Of the routed experts, those count that a token is given to. Packed documents see fewer
    keys; norms, RoPE, softmax, pooling and the mixing of streams are left out.

    Args:
      spec: the model, and the length of its rows.
      params: its parameters, or their shapes.
    """
    attention, seq_len = spec.settings.attention, spec.settings.data.seq_len
    model = 3 if spec.trains_model else 1
    indexer = 3 if spec.trains_indexer else int(spec.selects)
    flops = 0.0
    for module, name, value in hk.data_structures.traverse(params):
        passes = indexer if group(module, name) == "indexer" else model
        flops += 2 * passes * value.size * multiplied(spec, module, name)
    for kind in spec.settings.model.all_layers:
        pairs = spec.attend(kind).visibility.pairs(seq_len) / seq_len
        flops += 4 * model * pairs * attention.heads * attention.head_width
        if (visibility := spec.visibility(kind)).selects:
            local = SlidingWindow(attention.window).pairs(seq_len) / seq_len
            complete, attended = visibility.unselected().pairs(seq_len) / seq_len - local, pairs - local
            scored = complete if spec.selects or spec.trains_indexer else 0.0
            if spec.trains_indexer:
                scored += 2 * attended
                flops += 2 * attended * attention.heads * attention.head_width
            flops += 2 * scored * attention.index_heads * attention.index_head_width
    return flops


def multiplied(spec: Spec, module: str, name: str) -> float:
    """The share of a Haiku module's parameter that a token is multiplied with."""
    looked_up = name == "embeddings" and not spec.settings.model.tied_head
    if name in _NOT_MULTIPLIED or looked_up:
        return 0.0
    experts = spec.settings.experts
    return experts.per_token / experts.count if is_routed(module, name) else 1.0


def utilisation(flops_per_second: float) -> dict[str, float]:
    """Model FLOPs utilisation as `mfu`: over the bfloat16 peak of all devices; empty where that is not known."""
    chip = hardware.find_chip(jax.devices()[0].device_kind)
    return {} if chip is None else {"mfu": mfu(flops_per_second, chip.flops * jax.device_count())}


def mfu(flops_per_second: float, peak: float) -> float:
    """The share of the peak, both in FLOP/s."""
    return flops_per_second / peak
