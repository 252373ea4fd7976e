import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention import visibility as lib
from research.attention.visibility import KINDS, CompressedSparse, HeavilyCompressed, SlidingWindow
from research.settings.attention import Attention
from tests.oracles import visible

PACKINGS = {
    "one document": [0] * 70,
    "documents and padding": [-1] * 3 + [5] * 14 + [2] * 1 + [2] * 30 + [-1] * 8 + [0] * 14,
    "an id comes back": [1] * 20 + [0] * 20 + [1] * 30,
    "nothing": [-1] * 70,
}


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("segments", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize("seq_len", [1, 3, 69, 70])
@pytest.mark.parametrize(
    "visibility",
    [
        SlidingWindow(1),
        SlidingWindow(8),
        SlidingWindow(200),
        HeavilyCompressed(8, 16),
        HeavilyCompressed(1, 1),
        HeavilyCompressed(8, 71),
        CompressedSparse(8, 4, 3),
    ],
    ids=repr,
)
def test_equals_loops(visibility, seq_len, segments, xp):
    ids = xp.asarray(segments[:seq_len], np.int32)
    t, j, c = (xp.arange(n) for n in (seq_len, seq_len, visibility.num_entries(seq_len)))
    mask = visibility.sees_local(t[:, None], j[None]) & lib.same_segment(ids[:, None], ids[None])
    if visibility.compresses:
        of_entry = lib.entry_segments(ids, visibility.ratio)
        sees = visibility.sees_compressed(t[:, None], c[None]) & lib.same_segment(ids[:, None], of_entry[None])
        mask = xp.concatenate([mask, sees], axis=1)
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask, visible(visibility, segments[:seq_len]))


@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_segments_of_entries(dtype):
    segments = np.array([[0, 0, 0, 1, 1, 1, -1, -1], [-1, 3, 3, 3, 3, 3, 3, 3]], dtype)
    of_entry = lib.entry_segments(segments, 3)
    assert of_entry.dtype == dtype
    np.testing.assert_array_equal(of_entry, [[0, 1], [lib.STRADDLES, 3]])
    of_entry = lib.entry_segments(segments, 2)
    np.testing.assert_array_equal(of_entry, [[0, lib.STRADDLES, 1, lib.STRADDLES], [lib.STRADDLES, 3, 3, 3]])
    np.testing.assert_array_equal(jax.jit(lib.entry_segments, static_argnums=1)(jnp.asarray(segments), 2), of_entry)
    assert lib.entry_segments(segments, 9).shape == (2, 0)


def test_padding_and_straddling_entries_are_in_no_document():
    ids = np.array([0, 1, lib.PADDING, lib.STRADDLES])
    same = lib.same_segment(ids[:, None], ids[None])
    np.testing.assert_array_equal(same, np.diag([True, True, False, False]))


def test_every_kind_has_a_name_of_its_own():
    assert all(cls.kind == kind for kind, cls in KINDS.items())


def test_a_kinds_numbers_are_those_of_the_settings():
    settings = Attention(window=7, hca_ratio=16, csa_ratio=4, top_k=3)
    made = {kind: KINDS[kind].make(settings) for kind in ("sliding", "hca", "csa")}
    expected = {"sliding": SlidingWindow(7), "hca": HeavilyCompressed(7, 16), "csa": CompressedSparse(7, 4, 3)}
    assert made == expected
    assert [visibility.stride for visibility in made.values()] == [1, 16, 4]
    assert made["csa"].unselected() == HeavilyCompressed(7, 4)


@pytest.mark.parametrize("visibility", [SlidingWindow(8), HeavilyCompressed(8, 4), CompressedSparse(8, 4, 2)], ids=repr)
@pytest.mark.parametrize("offset", [0, 1, 20, 37])
def test_some_rows_of_a_sequence_follow_the_same_rule(visibility, offset):
    """A shard's: its first row is token `offset`, its local keys begin a window before it."""
    segments = np.array(PACKINGS["documents and padding"])
    selected = np.random.default_rng(0).random((70, 17)) < 0.4
    t, j = offset + np.arange(20), max(offset - 7, 0) + np.arange(27)
    whole = visible(visibility, segments)
    mask = visibility.local_mask(t[:, None], j[None], segments[t][:, None], segments[j][None])
    np.testing.assert_array_equal(mask, whole[t][:, j])
    if visibility.compresses:
        c, of_entry = np.arange(17), lib.entry_segments(segments, 4)
        mask = visibility.entry_mask(t[:, None], c[None], segments[t][:, None], of_entry[None], selected[t])
        np.testing.assert_array_equal(mask, whole[t][:, 70:] & selected[t])


@pytest.mark.parametrize("visibility", [SlidingWindow(8), HeavilyCompressed(8, 4), CompressedSparse(8, 4, 2)], ids=repr)
def test_equality_and_hash_cover_every_field(visibility):
    assert visibility == dataclasses.replace(visibility)
    assert hash(visibility) == hash(dataclasses.replace(visibility))
    for field in dataclasses.fields(visibility):
        other = dataclasses.replace(visibility, **{field.name: getattr(visibility, field.name) + 1})
        assert other != visibility
        assert hash(other) != hash(visibility)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(visibility, field.name, 1)


def test_kinds_with_the_same_numbers_differ():
    class Subclass(SlidingWindow):
        pass

    assert len({SlidingWindow(8), HeavilyCompressed(8, 4), CompressedSparse(8, 4, 4)}) == 3
    assert SlidingWindow(8) != Subclass(8)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (SlidingWindow, {"window": 8}),
        (HeavilyCompressed, {"window": 8, "ratio": 4}),
        (CompressedSparse, {"window": 8, "ratio": 4, "top_k": 2}),
    ],
)
def test_numbers_must_be_positive(kind, numbers, value):
    for field in numbers:
        with pytest.raises(ValueError, match=rf"^{kind.__name__}\.{field}={value}: must be positive$"):
            kind(**{**numbers, field: value})
