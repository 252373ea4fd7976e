import jax
import jax.numpy as jnp
import pytest

from research.attention.attend import Attend, Sizes, Target
from research.attention.backends import blockwise
from research.attention.visibility import CompressedSparse, HeavilyCompressed, SlidingWindow
from research.settings.attention import Kernel
from tests.attention.backends import strategies as lib

HEADS, WIDTH = 8, 16


def op(visibility, **options):
    return Attend("blockwise", visibility, Kernel(**options), Target("cpu"))


def effective(visibility, **options):
    return op(visibility, **options).effective(Sizes(512, HEADS, WIDTH, "float32"))


def temp_bytes(visibility, seq_len, **options):
    """The compiler's temporaries of forward and backward together."""
    entries = visibility.num_entries(seq_len)
    shapes = {"q": (1, seq_len, HEADS, WIDTH), "local": (1, seq_len, WIDTH), "compressed": (1, entries, WIDTH)}
    arguments = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    arguments["sinks"] = jax.ShapeDtypeStruct((HEADS,), jnp.float32)
    selected = jax.ShapeDtypeStruct((1, seq_len, entries), jnp.bool_) if visibility.selects else None

    def loss(arguments, selected, segments):
        given = {**arguments, "selected": selected, "segments": segments}
        return lib.call(op(visibility, **options), given).sum()

    segments = jax.ShapeDtypeStruct((1, seq_len), jnp.int32)
    compiled = jax.jit(jax.grad(loss)).lower(arguments, selected, segments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("visibility", [SlidingWindow(128), HeavilyCompressed(128, 128)], ids=["sliding", "hca"])
def test_memory_grows_with_the_sequence_alone(visibility):
    small, large = temp_bytes(visibility, 8192), temp_bytes(visibility, 32768)
    assert large < 4.1 * small
    # Nothing the size of S x S is ever made, were it of single bytes, and but a few of q's own.
    assert large < 32768**2 / 8
    assert large < 6 * 4 * 32768 * HEADS * WIDTH


@pytest.mark.parametrize("schedule", blockwise.SCHEDULES)
def test_csa_never_holds_its_logits(schedule):
    seq_len, visibility = 8192, CompressedSparse(128, 4, 512)
    mask = seq_len * visibility.num_entries(seq_len)  # the indexer's choice itself, in bytes
    held = temp_bytes(visibility, seq_len, schedule=schedule)
    assert held < 2 * mask + 6 * 4 * seq_len * HEADS * WIDTH
    assert held < mask * HEADS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_q": 513}, "block_q=513: must be 0 .* between 1 and 512"),
        ({"block_kv": 5}, "block_kv=5: must be 0 .* between 1 and 4"),
        ({"block_q": -1}, "block_q=-1: "),
        ({"schedule": "gather"}, "schedule='gather': must be left at .*: it has no effect with backend='blockwise'"),
        ({"schedule": "static"}, "schedule='static': must be left at .*: it has no effect with backend='blockwise'"),
        (
            {"dq_reduction_steps": 3},
            "dq_reduction_steps=3: must be left at .*: it has no effect with backend='blockwise'",
        ),
    ],
)
def test_options_it_cannot_honour_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        effective(HeavilyCompressed(128, 128), **options)


def test_csa_gathers_once_most_entries_are_not_selected():
    few, many = CompressedSparse(128, 4, 32), CompressedSparse(128, 4, 33)
    assert effective(few)["schedule"] == "gather"
    assert effective(many)["schedule"] == "stream"
    with pytest.raises(ValueError, match="block_kv=64: must be left at 0: it has no effect"):
        effective(few, schedule="gather", block_kv=64)


def test_block_of_entries_means_nothing_to_a_sliding_window():
    with pytest.raises(ValueError, match="block_kv=64: must be left at 0: it has no effect"):
        effective(SlidingWindow(128), block_kv=64)
