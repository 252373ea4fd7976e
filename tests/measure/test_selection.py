import os

import jax
import numpy as np
import pytest

from research.attention.indexer.scores import Index
from research.attention.visibility import CompressedSparse
from research.measure import pipeline, selection
from research.measure.program import Program
from research.settings.config import Settings


def program(way):
    return Program("selection", way, Settings().replace(attention={"top_k": 16}, data={"seq_len": 512}))


@pytest.mark.parametrize("top_k", [1, 16, 64, 100])
def test_all_ways_make_the_same_choice(top_k):
    keys = jax.random.split(jax.random.key(top_k), 3)
    shapes = ((1, 300, 4, 8), (1, 75, 8), (1, 300, 4))
    index = Index(*(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)))
    choices = [np.asarray(way(index, CompressedSparse(8, 4, top_k))) for way in selection.WAYS.values()]
    assert len(choices) == 3
    np.testing.assert_array_equal(choices[0].sum(-1)[0], np.minimum(top_k, (np.arange(300) + 1) // 4))
    for choice in choices[1:]:
        np.testing.assert_array_equal(choice, choices[0])


def test_a_row_holds_times_and_bytes():
    (row,) = pipeline.run(program("streamed"), timeout=300)
    assert (row["status"], row["entries"]) == ("ok", 128)
    assert row["seconds"] > 0
    assert row["peak_rss_bytes"] > row["temp_bytes"] > 0


def test_what_does_not_fit_is_not_run(monkeypatch):
    """The kernel would kill some process, and not necessarily this one."""
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.get)
    row = next(selection.rows(program("one_hot")))
    assert (row["status"], row["available_bytes"]) == ("out of host memory", 40_960)
    assert row["temp_bytes"] > 40_960
    assert "seconds" not in row


def test_a_crash_is_a_row(monkeypatch):
    monkeypatch.setitem(selection.ENVIRONMENT, "JAX_PLATFORMS", "no such thing")
    (row,) = pipeline.run(program("streamed"), timeout=300)
    assert row["status"] != "ok"
    assert "no such thing" in row["message"]
    assert "seconds" not in row
