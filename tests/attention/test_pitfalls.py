"""Faults that others shipped, each with the right answer."""

import jax.numpy as jnp
import numpy as np
import pytest

from research.attention import backends
from research.attention.backends.dot_product import dense_mask
from research.attention.visibility import CompressedSparse, HeavilyCompressed, SlidingWindow
from research.errors import SettingError
from research.settings.attention import Kernel
from tests.attention.backends import strategies as lib

HCA = HeavilyCompressed(window=128, ratio=128)
# The default of each backend; tests/attention/test_contract.py has the schedules.
every_backend = pytest.mark.parametrize("backend", backends.NAMES)


def local_part(visibility, seq_len, segments=None) -> np.ndarray:
    return seen(visibility, seq_len, segments)[:, :seq_len]


def entries_part(visibility, seq_len, segments=None) -> np.ndarray:
    return seen(visibility, seq_len, segments)[:, seq_len:]


def seen(visibility, seq_len, segments=None) -> np.ndarray:
    segments = [0] * seq_len if segments is None else segments
    return np.asarray(dense_mask(visibility, jnp.array([segments], jnp.int32))[0])


def attend(backend, visibility, arguments, **replaced):
    return np.asarray(lib.call(lib.Strategy(backend).attend(visibility), arguments | replaced))


def test_window_of_128_is_128_keys_with_oneself():
    local = local_part(SlidingWindow(128), 300)
    assert np.flatnonzero(local[200]).tolist() == list(range(73, 201))
    assert local.sum(axis=1).tolist() == [min(t + 1, 128) for t in range(300)]


def test_ratio_is_given_and_not_inferred_from_lengths():
    counts = entries_part(HCA, 489).sum(axis=1)
    assert counts[[126, 127, 254, 255, 382, 383, 488]].tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert counts.tolist() == [(t + 1) // 128 for t in range(489)]


def test_no_entry_is_invented_below_the_ratio():
    assert HCA.num_entries(127) == 0
    assert entries_part(HCA, 127).shape == (127, 0)
    assert HCA.num_entries(128) == 1


@every_backend
def test_without_entries_hca_is_sliding_attention(backend):
    arguments, _ = lib.inputs(HCA, 100, lib.documents(100)[:1])
    sliding = attend(backend, SlidingWindow(128), arguments)
    np.testing.assert_array_equal(attend(backend, HCA, arguments), sliding)
    assert sliding.any()


@every_backend
def test_unfinished_window_does_not_exist(backend):
    arguments, _ = lib.inputs(HCA, 512, np.zeros((1, 512)))
    shorter = {name: array[:, :489] for name, array in arguments.items() if name in ("q", "local", "segments")}
    shorter["compressed"] = arguments["compressed"][:, :3]
    cut = attend(backend, HCA, arguments, **shorter)
    np.testing.assert_allclose(cut, attend(backend, HCA, arguments)[:, :489], atol=1e-6)


@every_backend
def test_as_many_entries_as_tokens(backend):
    """Entries are not cut to the local length, nor to the window."""
    visibility = HeavilyCompressed(window=8, ratio=1)
    arguments, d_out = lib.inputs(visibility, 40)
    of_last_row = jnp.zeros_like(d_out).at[:, 39].set(1.0)
    results = lib.differentiated(lib.Strategy(backend), visibility)(arguments, of_last_row)
    assert np.asarray(results["compressed"]).any(axis=-1).all()
    assert np.flatnonzero(np.asarray(results["local"]).any(axis=(0, 2))).tolist() == list(range(32, 40))


def test_token_50_of_64_does_not_reach_back():
    visibility = HeavilyCompressed(window=8, ratio=4)
    arguments, _ = lib.inputs(visibility, 64)
    changed = {name: arguments[name].at[:, 50].add(1.0) for name in ("q", "local")}
    changed["compressed"] = arguments["compressed"].at[:, 12].add(1.0)
    for backend in ("dot_product", "blockwise"):
        before = attend(backend, visibility, arguments)
        after = attend(backend, visibility, arguments, **changed)
        np.testing.assert_array_equal(after[:, :50], before[:, :50])
        assert (after[:, 50] != before[:, 50]).any()
        assert (after[:, 63] != before[:, 63]).any()


def test_local_branch_has_a_window():
    """W=8, S=64: row 63 depends on token 0 through compressed entries alone."""
    assert not local_part(HeavilyCompressed(8, 4), 64)[63, 0]
    assert entries_part(HeavilyCompressed(8, 4), 64)[63, 0]
    assert local_part(HeavilyCompressed(8, 4), 64)[63].sum() == 8
    assert not seen(SlidingWindow(8), 64)[63, :56].any()


def test_future_entries_are_not_seen_though_selected():
    """S=32, R=4: of all entries, token 9 sees 0 and 1."""
    visibility = CompressedSparse(window=8, ratio=4, top_k=8)
    everything = jnp.ones((1, 32, 8), bool)
    mask = np.asarray(dense_mask(visibility, jnp.zeros((1, 32), jnp.int32), everything)[0, :, 32:])
    assert np.flatnonzero(mask[9]).tolist() == [0, 1]
    assert mask.sum(axis=1).tolist() == [(t + 1) // 4 for t in range(32)]


def test_straddling_window_belongs_to_nobody():
    """S=489, R=128, a document starts at 200: entry 1 pools tokens of both."""
    segments = [0] * 200 + [1] * 289
    entries = entries_part(HCA, 489, segments)
    assert not entries[:, 1].any()
    assert not entries[200:, 0].any()
    assert np.flatnonzero(entries[:, 2]).tolist() == list(range(383, 489))
    assert not local_part(HCA, 489, segments)[200:, :200].any()


def test_positions_within_a_document_are_not_compared_with_entries():
    """[0]*256 + [1]*256: row 400, the 145th of its document, sees entry 2 and no other."""
    entries = entries_part(HCA, 512, [0] * 256 + [1] * 256)
    assert np.flatnonzero(entries[400]).tolist() == [2]
    assert np.flatnonzero(entries[511]).tolist() == [2, 3]


def test_padding_does_not_attend_padding():
    mask = seen(HeavilyCompressed(8, 4), 32, [-1] * 12 + [0] * 8 + [-1] * 12)
    assert not mask[:12].any()
    assert not mask[20:].any()
    assert not mask[:, :12].any()
    assert not mask[:, 20:32].any()
    assert np.flatnonzero(mask[19, 32:]).tolist() == [3, 4]


@every_backend
def test_row_with_only_a_sink_is_zero(backend):
    """As is the sink's gradient: whatever its logit, it takes weight from nothing."""
    visibility = HeavilyCompressed(window=8, ratio=4)
    arguments, d_out = lib.inputs(visibility, 8, [[-1] * 8])
    results = lib.differentiated(lib.Strategy(backend), visibility)(arguments, d_out)
    for name, array in results.items():
        assert not np.asarray(array).any(), name


def test_steps_of_two_are_refused():
    with pytest.raises(SettingError, match=r"^config.attention.dq_reduction_steps=2: must be 0 .* or 3$"):
        Kernel(dq_reduction_steps=2)
