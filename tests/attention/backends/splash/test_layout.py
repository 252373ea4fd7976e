import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention.backends.splash import layout as lib
from research.attention.backends.splash.schedules.static import LayoutMask
from research.attention.visibility import PADDING, STRADDLES, CompressedSparse, HeavilyCompressed, SlidingWindow
from tests.oracles import visible

# Lengths at which padded queries would outnumber padded keys, and their neighbours.
LENGTHS = [(128, 128, n) for n in (1, 128, 129, 255, 382, 489, 509, 636)]
LENGTHS += [(512, 512, 509), (512, 512, 1017), (256, 128, 489), (128, 256, 382), (384, 256, 489)]
VISIBILITIES = [SlidingWindow(128), HeavilyCompressed(128, 128), HeavilyCompressed(100, 7)]


def real_columns(layout) -> np.ndarray:
    """Where the S local keys and C entries lie."""
    return np.r_[: layout.seq_len, layout.local_len : layout.local_len + layout.entries]


def check(mask, layout, segments=None, selected=None):
    """The kernel's mask shows real tokens and entries what they may see and nothing else, and every row itself."""
    mask = np.array(mask)
    assert mask.shape == (layout.q_len, layout.kv_len)
    assert mask[np.arange(layout.q_len), np.arange(layout.q_len)].all()
    real = np.zeros(layout.kv_len, bool)
    real[real_columns(layout)] = True
    segments = np.zeros(layout.seq_len, int) if segments is None else segments
    rows = np.flatnonzero(np.asarray(segments) >= 0)
    assert not mask[rows][:, ~real].any()
    right = visible(layout.visibility, segments, selected)
    np.testing.assert_array_equal(mask[rows][:, real], right[rows])


@pytest.mark.parametrize(("block_q", "block_kv", "seq_len"), LENGTHS)
@pytest.mark.parametrize("visibility", VISIBILITIES, ids=repr)
def test_static_mask_equals_loops(visibility, block_q, block_kv, seq_len):
    layout = lib.make(visibility, seq_len, (block_q,), (block_kv,))
    mask = LayoutMask(layout)
    assert mask.shape == (layout.q_len, layout.kv_len)
    check(mask[:, :], layout)
    rows, cols = slice(layout.q_len - 128, layout.q_len), slice(layout.local_len - 128, layout.local_len + 128)
    np.testing.assert_array_equal(mask[rows, cols], mask[:, :][rows, cols])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("block_q", "block_kv", "seq_len"), LENGTHS)
@pytest.mark.parametrize("visibility", [*VISIBILITIES, CompressedSparse(128, 4, 200)], ids=repr)
def test_runtime_mask_equals_loops(visibility, block_q, block_kv, seq_len, packed):
    layout = lib.make(visibility, seq_len, (block_q,), (block_kv,))
    segments = np.digitize(np.arange(seq_len), [seq_len // 3, seq_len - seq_len // 5]) if packed else None
    if packed:
        segments[seq_len // 2 : seq_len // 2 + seq_len // 8] = PADDING
    selected = None
    if visibility.kind == "csa":
        selected = np.random.default_rng(0).random((seq_len, layout.entries)) < 0.5

    @jax.jit
    def mask(segments, selected):
        ids = (None, None) if segments is None else layout.segment_ids(segments[None])
        return layout.runtime_mask(*(None if part is None else part[0] for part in ids), selected)

    ids = None if segments is None else segments.astype(np.int32)
    check(mask(ids, selected), layout, segments, selected)


@pytest.mark.parametrize("visibility", VISIBILITIES, ids=repr)
@pytest.mark.parametrize(
    ("block_q", "block_kv"), [((128,), (128,)), ((512, 128), (256, 512)), ((384, 256), (128, 384))]
)
def test_lengths(visibility, block_q, block_kv):
    for seq_len in (*range(1, 1600, 61), 127, 128, 129, 255, 382, 489, 509, 512, 636, 1017, 1024, 1525):
        layout = lib.make(visibility, seq_len, block_q, block_kv)
        assert layout.seq_len <= layout.q_len < seq_len + math.lcm(*block_q)
        assert layout.entries == visibility.num_entries(seq_len) <= layout.compressed_len
        assert layout.q_len <= layout.local_len
        assert layout.kv_len == layout.local_len + layout.compressed_len
        assert all(layout.q_len % size == 0 for size in block_q)
        for size in block_kv:
            assert layout.local_len % size == 0
            assert layout.kv_len % size == 0
            assert layout.kv_len // size >= 3
        assert (layout.compressed_len == 0) == (layout.entries == 0)


def test_where_keys_and_segments_lie():
    layout = lib.make(HeavilyCompressed(8, 100), 250, (256,), (128,))
    assert (layout.q_len, layout.local_len, layout.compressed_len) == (256, 256, 128)
    local, compressed = jnp.ones((2, 250, 3)), jnp.full((2, 2, 3), 2.0)
    keys = np.asarray(layout.join_keys(local, compressed))
    assert keys.shape == (2, 384, 3)
    np.testing.assert_array_equal(keys[0, :, 0], [1] * 250 + [0] * 6 + [2] * 2 + [0] * 126)
    queries = layout.pad_queries(jnp.ones((1, 4, 250, 3)), axis=2)
    assert queries.shape == (1, 4, 256, 3)
    assert queries.sum() == 4 * 250 * 3
    rows, cols = layout.segment_ids(jnp.array([[0] * 120 + [1] * 120 + [-1] * 10], jnp.int32))
    real = [0] * 120 + [1] * 120 + [PADDING] * 10
    assert rows[0].tolist() == real + [PADDING] * 6
    assert cols[0].tolist() == real + [PADDING] * 6 + [0, STRADDLES] + [STRADDLES] * 126


def test_equality_and_hash_cover_every_field():
    def make():
        return lib.make(HeavilyCompressed(128, 128), 489, (128,), (128,))

    others = [
        dataclasses.replace(make(), visibility=HeavilyCompressed(*numbers)) for numbers in ((127, 128), (128, 127))
    ]
    others += [
        dataclasses.replace(make(), **{field.name: getattr(make(), field.name) + 128})
        for field in dataclasses.fields(make())
        if field.name != "visibility"
    ]
    assert len(others) == 1 + len(dataclasses.fields(make()))
    for wrap in (lambda layout: layout, LayoutMask):
        assert wrap(make()) == wrap(make())
        assert hash(wrap(make())) == hash(wrap(make()))
        for other in others:
            assert wrap(other) != wrap(make())
            assert hash(wrap(other)) != hash(wrap(make()))
    assert LayoutMask(make()) != make()
