"""Our layer against Hugging Face transformers' DeepSeek-V4 itself: `make parity` (requirements-parity.txt)."""

import haiku as hk
import jax
import numpy as np
import pytest

from research.attention.attend import Documents
from research.attention.indexer.module import Indexer, select
from research.attention.layer.rope import frequencies
from research.attention.visibility import KINDS, CompressedSparse
from tests.parity import cases

pytestmark = pytest.mark.parity
LIVE_CASES = [*cases.CASES, ("sliding", cases.LONG, cases.YARN), *((kind, 489, cases.YARN) for kind in KINDS)]
SEED = 100  # not the fixtures'


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("transformers", reason="needs requirements-parity.txt")
    from tests.parity import reference

    return reference


def draw(seq_len: int) -> np.ndarray:
    return np.random.default_rng(seq_len).standard_normal((2, 1, seq_len, cases.HIDDEN), dtype=np.float32)


@pytest.mark.parametrize(("kind", "seq_len", "rope"), LIVE_CASES, ids=cases.case_id)
def test_outputs_and_gradients(reference, kind, seq_len, rope):
    x, cotangent = draw(seq_len)
    layer = reference.Reference(kind, rope, SEED)
    expected = layer.run(x, cotangent)
    cases.assert_equal(cases.run(kind, rope, layer.parameters(), x, cotangent), expected)


@pytest.mark.parametrize("seq_len", [seq_len for seq_len in cases.LENGTHS if seq_len >= cases.ATTENTION.csa_ratio])
def test_the_indexer_selects_the_same_entries(reference, seq_len):
    x, cotangent = draw(seq_len)
    layer = reference.Reference("csa", cases.YARN, SEED)
    layer.run(x, cotangent)
    settings = cases.ATTENTION

    def forward(x, low_rank_q):
        freqs = frequencies(cases.YARN, settings.rope_width, compressed=True)
        documents, indexer = Documents.whole(1, seq_len), Indexer(settings, 1e-6, freqs)
        index = indexer(x, low_rank_q, documents)
        return select(index, CompressedSparse.make(settings), documents, cases.spec().scoring)

    parameters = {
        name.removeprefix("attention/"): array
        for name, array in layer.parameters().items()
        if name.startswith("attention/indexer/")
    }
    apply = jax.jit(hk.without_apply_rng(hk.transform(forward)).apply)
    selected = np.asarray(apply(cases.unflatten(parameters), *layer.indexer_inputs))
    np.testing.assert_array_equal(selected, layer.selected)
    counts = np.minimum(settings.top_k, (np.arange(seq_len) + 1) // settings.csa_ratio)
    np.testing.assert_array_equal(selected.sum(axis=-1)[0], counts)
