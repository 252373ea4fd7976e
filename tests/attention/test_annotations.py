"""The check of annotations that `tests/conftest.py` installs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from research.attention.attend import Documents
from research.attention.backends.dot_product import dense_mask
from research.attention.layer.compressor import pool
from research.attention.visibility import HeavilyCompressed

SEGMENTS = jnp.zeros((2, 10), jnp.int32)


def test_right_shapes_pass():
    assert dense_mask(HeavilyCompressed(4, 4), SEGMENTS).shape == (2, 10, 12)


@pytest.mark.parametrize(
    "segments",
    [SEGMENTS[0], SEGMENTS[..., None], SEGMENTS.astype(jnp.float32), np.asarray(SEGMENTS), None],
    ids=["an axis fewer", "an axis more", "another dtype", "an array of NumPy", "no array"],
)
def test_wrong_argument_raises(segments):
    with pytest.raises(TypeCheckError, match="parameter 'segments'"):
        dense_mask(HeavilyCompressed(4, 4), segments)


def test_axes_of_one_letter_are_equal():
    with pytest.raises(TypeCheckError, match="parameter 'gates'"):
        pool(jnp.zeros((2, 3, 4, 8)), jnp.zeros((2, 3, 4, 6)))


@pytest.mark.usefixtures("unchecked_shapes")
def test_the_check_can_be_turned_off():
    assert dense_mask(HeavilyCompressed(4, 4), np.asarray(SEGMENTS)).shape == (2, 10, 12)


@pytest.mark.parametrize("leaf", [None, "sharding", jax.ShapeDtypeStruct((3,), jnp.float32)])
def test_documents_are_rebuilt_with_any_leaves(leaf):
    rebuilt = jax.tree.map(lambda _: leaf, Documents.whole(2, 10))
    assert (rebuilt.positions, rebuilt.segments, rebuilt.packed) == (leaf, leaf, False)
