"""The whole model of the fixture `whole/`: our side of it, and the comparison. Imports no PyTorch and no transformers.

`whole/weights` is a checkpoint that transformers wrote, `whole/gradients` holds the gradients under the names of its
modules, `whole/answers.npz` the tokens, the cotangent of the logits, and the logits.
"""

import pathlib
import re
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from research.attention.attend import Documents
from research.attention.spec import Spec
from research.importing import config, layout, weights
from research.model import language_model
from research.settings.config import Settings, base_config, read
from research.settings.fields import override
from tests import oracles
from tests.parity import cases

FOLDER = cases.FIXTURES / "whole"
SEQ_LEN = 300
_UNTRAINED = re.compile(r"\.indexer\.|\.gate\.(bias|tid2eid)$")


def settings(folder: pathlib.Path) -> Settings:
    """Of a checkpoint's config.json, with the dense attention."""
    made = base_config()
    override(made, config.read(folder) | {"attention.backend": "dot_product"})
    return read(made)


def from_folder(folder: pathlib.Path, of: Settings, *, untrained: bool = True) -> hk.Params:
    """Our tree of the tensors of a folder, 0 for those that no loss trains if those are not there."""
    shapes = weights.shapes(of).params
    stored, _ = weights.contents(folder)
    tree = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    for part in layout.parts(shapes, of.model):
        module, name = part.parameter
        if untrained or not _UNTRAINED.search(part.name):
            tree[module][name][part.place] = part.ours(stored[part.name].read(part.name))
    return tree


def logits(of: Settings, params: hk.Params, tokens: np.ndarray) -> np.ndarray:
    """Float32 [B, S, V]."""
    apply = language_model.build(Spec.make(of)).apply
    return np.asarray(jax.jit(apply)(params, None, tokens, Documents.whole(*tokens.shape)).logits)


def gradients(of: Settings, params: hk.Params, tokens: np.ndarray, cotangent: np.ndarray) -> hk.Params:
    """Those of `sum(logits * cotangent)` by each parameter of floats."""
    apply, tokens = language_model.build(Spec.make(of)).apply, jnp.asarray(tokens)
    trained, tables = hk.data_structures.partition(lambda module, name, _: name != "table", params)

    @jax.jit
    def pull_back(trained: Any, tables: Any) -> Any:
        def total(trained: Any) -> jax.Array:
            merged = hk.data_structures.merge(trained, tables)
            return (apply(merged, None, tokens, Documents.whole(*tokens.shape)).logits * jnp.asarray(cotangent)).sum()

        return jax.grad(total)(trained)

    return jax.device_get(pull_back(trained, tables))


def assert_gradients_close(ours: hk.Params, expected: hk.Params) -> None:
    """To 1e-4 of the largest entry of each layer's."""
    for module, name, array in hk.data_structures.traverse(ours):
        reference = expected[module][name]
        layers = zip(array, reference, strict=True) if module.startswith("blocks/") else [(array, reference)]
        for own, theirs in layers:
            try:
                oracles.assert_close(own, theirs, 1e-4)
            except AssertionError as error:
                error.add_note(f"in {module}/{name}")
                raise
