"""What `attend` refuses, under every backend."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from research.attention import attend as attend_lib
from research.attention import backends
from research.attention.visibility import CompressedSparse, HeavilyCompressed, SlidingWindow
from research.errors import ConfigError
from tests.attention.backends import strategies as lib

SEQ_LEN = 10
VISIBILITIES = {"sliding": SlidingWindow(4), "hca": HeavilyCompressed(4, 4), "csa": CompressedSparse(4, 4, 1)}


def attend(backend, kind, **replaced):
    arguments, _ = lib.inputs(VISIBILITIES[kind], SEQ_LEN, np.zeros((2, SEQ_LEN)))
    return lib.call(lib.Strategy(backend).attend(VISIBILITIES[kind]), arguments | replaced)


REFUSED = {
    "three axes": ("hca", "q", jnp.zeros((2, SEQ_LEN, 16)), r"must be \[B, S, H, D\]"),
    "fewer local keys": ("hca", "local", jnp.zeros((2, 9, 16)), r"float32 \[2, 9, 16\], must be float32 \[2, 10, 16\]"),
    "local keys per head": ("hca", "local", jnp.zeros((2, SEQ_LEN, 2, 16)), r"must be float32 \[2, 10, 16\]"),
    "another dtype": ("hca", "local", jnp.zeros((2, SEQ_LEN, 16), jnp.bfloat16), r"bfloat16 .* must be float32"),
    "unfinished entry": ("hca", "compressed", jnp.zeros((2, 3, 16)), r"\[2, 3, 16\], must be float32 \[2, 2, 16\]"),
    "missing entry": ("csa", "compressed", jnp.zeros((2, 1, 16)), r"must be float32 \[2, 2, 16\]"),
    "entry without a ratio": ("sliding", "compressed", jnp.zeros((2, 1, 16)), r"must be float32 \[2, 0, 16\]"),
    "sinks of another dtype": ("hca", "sinks", jnp.zeros(2, jnp.bfloat16), r"bfloat16 \[2\], must be float32 \[2\]"),
    "sinks of other heads": ("hca", "sinks", jnp.zeros(3), r"must be float32 \[2\]"),
    "int64 segments": ("hca", "segments", np.zeros((2, SEQ_LEN), np.int64), r"int64 .* must be int32 \[2, 10\]"),
    "boolean segments": ("hca", "segments", jnp.zeros((2, SEQ_LEN), bool), r"bool .* must be int32"),
    "one row of segments": (
        "hca",
        "segments",
        jnp.zeros((1, SEQ_LEN), jnp.int32),
        r"must be int32 \[2, 10\]",
    ),
    "short segments": ("hca", "segments", jnp.zeros((2, 9), jnp.int32), r"\[2, 9\], must be int32 \[2, 10\]"),
    "nothing selected": ("csa", "selected", None, r"None, but CompressedSparse needs .* bool \[B, S, C\]"),
    "selection by index": ("csa", "selected", jnp.zeros((2, SEQ_LEN, 1), jnp.int32), r"must be bool \[2, 10, 2\]"),
    "selection by weight": ("csa", "selected", jnp.zeros((2, SEQ_LEN, 2)), r"float32 .* must be bool \[2, 10, 2\]"),
    "selection for hca": (
        "hca",
        "selected",
        jnp.ones((2, SEQ_LEN, 2), bool),
        r"HeavilyCompressed takes none",
    ),
    "selection for sliding": ("sliding", "selected", jnp.ones((2, SEQ_LEN, 0), bool), r"SlidingWindow takes none"),
}


@pytest.mark.parametrize(("kind", "name", "value", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("backend", backends.NAMES)
def test_refused_argument_is_named(backend, kind, name, value, message):
    place = {"local": "keys.", "compressed": "keys.", "segments": "documents."}.get(name, "")
    with pytest.raises(ValueError, match=f"^{place}{name}: .*{message}"):
        attend(backend, kind, **{name: value})


@pytest.mark.parametrize("kind", VISIBILITIES)
@pytest.mark.parametrize("backend", ["dot_product", "blockwise"])
def test_the_same_without_a_fault_is_served(backend, kind):
    assert attend(backend, kind).shape == (2, SEQ_LEN, lib.HEADS, lib.WIDTH)


def test_unknown_backend_is_told_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"^config.attention.backend='flash': must be one of auto, dot_product, .*splash"
    ):
        attend_lib.resolve_backend("flash", "cpu")


def test_auto_follows_the_platform():
    assert attend_lib.resolve_backend("auto", "tpu") == "splash"
    assert attend_lib.resolve_backend("auto", "gpu") == "joined"
    assert attend_lib.resolve_backend("auto", "cpu") == "blockwise"
    for name in backends.NAMES:
        assert attend_lib.resolve_backend(name, "cpu") == name


def test_shapes_are_checked_in_tests():
    """By their annotations: what these tests call is held to them."""
    with pytest.raises(TypeCheckError, match="'B S H D'"):
        attend("dot_product", "hca", q=jnp.zeros((2, SEQ_LEN, 16)))
