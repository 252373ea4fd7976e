"""Where each tensor of a published checkpoint is in our tree of parameters, and how it lies there.

A linear layer's matrix is [out, in] there and [in, out] here. Layers are counted there; here they have a name in the
prefix, or a name in the stack and a place along its first axis. Experts are matrices there and here one array.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import haiku as hk
import numpy as np

from research.settings.model import Model

_MATRIX = ".weight"  # what ends so is a matrix, unless it is of a norm or the embedding
_TOP = {
    "embed/embeddings": "embed.weight",
    "collapse/gates": "hc_head_fn",
    "collapse/bias": "hc_head_base",
    "collapse/scale": "hc_head_scale",
    "final_norm/scale": "norm.weight",
    "~/head": "head.weight",
}
_COMPRESSOR = {"values": "wkv.weight", "gates": "wgate.weight", "position_bias": "ape", "norm/scale": "norm.weight"}
_STREAMS = {"gates": "fn", "bias": "base", "scale": "scale"}
_MATRICES = {"gate": "w1", "down": "w2", "up": "w3"}
_LAYER = {
    "attention_norm/scale": "attn_norm.weight",
    "ffn_norm/scale": "ffn_norm.weight",
    **{f"attention_streams/{ours}": f"hc_attn_{theirs}" for ours, theirs in _STREAMS.items()},
    **{f"ffn_streams/{ours}": f"hc_ffn_{theirs}" for ours, theirs in _STREAMS.items()},
    "attention/q_down": "attn.wq_a.weight",
    "attention/q_norm/scale": "attn.q_norm.weight",
    "attention/q_up": "attn.wq_b.weight",
    "attention/kv": "attn.wkv.weight",
    "attention/kv_norm/scale": "attn.kv_norm.weight",
    "attention/sinks": "attn.attn_sink",
    "attention/out_down": "attn.wo_a.weight",
    "attention/out_up": "attn.wo_b.weight",
    **{f"attention/compressor/{ours}": f"attn.compressor.{theirs}" for ours, theirs in _COMPRESSOR.items()},
    "attention/indexer/q_up": "attn.indexer.wq_b.weight",
    "attention/indexer/head_weights": "attn.indexer.weights_proj.weight",
    **{f"attention/indexer/compressor/{ours}": f"attn.indexer.compressor.{s}" for ours, s in _COMPRESSOR.items()},
    "experts/router/scores": "ffn.gate.weight",
    "experts/router/balance": "ffn.gate.bias",
    "experts/router/table": "ffn.gate.tid2eid",
    **{f"experts/shared_{ours}": f"ffn.shared_experts.{theirs}.weight" for ours, theirs in _MATRICES.items()},
}
_EXPERTS = {f"experts/{ours}": f"ffn.experts.{{}}.{theirs}.weight" for ours, theirs in _MATRICES.items()}


class Part(NamedTuple):
    """A published tensor and the part of our parameters that it is.

    Attributes:
      name: its own.
      parameter: Haiku module and name.
      place: in the parameter's array.
      shape: that of the part, here.
      dtype: of the parameter.
      is_matrix: whether it lies [out, in] there; with groups, those are rows [groups * out, in].
    """

    name: str
    parameter: tuple[str, str]
    place: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    is_matrix: bool

    @property
    def published_shape(self) -> tuple[int, ...]:
        """The tensor's."""
        if not self.is_matrix:
            return self.shape
        *groups, inputs, outputs = self.shape
        return (int(np.prod(groups, dtype=int)) * outputs, inputs)

    def ours(self, array: np.ndarray) -> np.ndarray:
        """The part, of the tensor."""
        if not self.is_matrix:
            return array
        return array.reshape(*self.shape[:-2], self.shape[-1], self.shape[-2]).swapaxes(-1, -2)

    def theirs(self, part: np.ndarray) -> np.ndarray:
        """The tensor, of the part."""
        return part.swapaxes(-1, -2).reshape(self.published_shape) if self.is_matrix else part


def parts(params: hk.Params, model: Model) -> list[Part]:
    """The tensors of all parameters, in the order of the layers.

    Args:
      params: all of a model's, or their shapes.
      model: its settings.

    Raises:
      KeyError: a parameter has no published counterpart.
    """
    found = []
    for module, name, array in hk.data_structures.traverse(params):
        found += _parts_of(module, name, array, model)
    return sorted(found, key=lambda part: [int(text) if text.isdigit() else text for text in part.name.split(".")])


def _parts_of(module: str, name: str, array: Any, model: Model) -> Iterator[Part]:
    path, shape, dtype = f"{module}/{name}", tuple(array.shape), np.dtype(array.dtype)
    if path in _TOP:
        yield _part(_TOP[path], module, name, (), shape, dtype)
        return
    where = re.match(r"(?:prefix_(\d+)|blocks/layer_(\d+))_[a-z]+/", path)
    if where is None:
        raise KeyError(path)
    in_prefix, in_stack = where.groups()
    own, before = path[where.end() :], len(model.prefix)
    layers = [(int(in_prefix), ())] if in_prefix else []
    if in_stack:
        layers = [(before + repeat * len(model.layers) + int(in_stack), (repeat,)) for repeat in range(model.repeats)]
    for layer, place in layers:
        one, prefix = shape[len(place) :], f"layers.{layer}."
        if own not in _EXPERTS:
            yield _part(prefix + _LAYER[own], module, name, place, one, dtype)
            continue
        for expert in range(one[0]):
            yield _part(prefix + _EXPERTS[own].format(expert), module, name, (*place, expert), one[1:], dtype)


def _part(name: str, module: str, parameter: str, place: tuple, shape: tuple, dtype: np.dtype) -> Part:
    is_matrix = (len(shape) >= 2 and name.endswith(_MATRIX) and name != "embed.weight") or name.endswith("_fn")
    return Part(name, (module, parameter), place, shape, dtype, is_matrix)
