"""What is the joined backend's own: its kernels by chip, ranges, and the loops that large sizes are cut into."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention.attend import Sizes, Target
from research.attention.backends.joined import attend as joined
from research.attention.backends.joined import xla
from research.attention.visibility import entry_segments
from research.errors import SettingError
from research.settings.attention import Kernel
from tests.attention.backends import strategies as lib
from tests.oracles import DIFFERENTIABLE, assert_close

SEQ_LEN = 384
KINDS = lib.visibilities(window=100, hca_ratio=32)


def effective(kind="hca", target=None, dtype="bfloat16", width=64, seq_len=512, **options):
    schedule = options.pop("csa_schedule", "auto")
    strategy = lib.Strategy("joined", Kernel(schedule, **options))
    return strategy.attend(KINDS[kind], target or Target("gpu", chip="h100")).effective(
        Sizes(seq_len, 8, width, dtype, packed=True)
    )


@pytest.mark.parametrize(
    ("target", "dtype", "width", "kernel"),
    [
        (Target("gpu", chip="h100"), "bfloat16", 256, "mosaic"),
        (Target("gpu", chip="h200"), "bfloat16", 64, "mosaic"),
        (Target("gpu", chip="h100"), "bfloat16", 512, "triton"),
        (Target("gpu", chip="h100"), "float32", 64, "triton"),
        (Target("gpu", chip="a100"), "bfloat16", 64, "triton"),
        (Target("gpu", chip="b200"), "bfloat16", 64, "triton"),
        (Target("gpu"), "bfloat16", 64, "triton"),
        (Target("cpu"), "bfloat16", 64, "xla"),
    ],
)
def test_the_kernel_is_chosen_by_chip_width_and_dtype(target, dtype, width, kernel):
    found = effective(target=target, dtype=dtype, width=width)
    assert found["flash_kernel"] == kernel
    assert ("block_kv" in found) == (kernel == "xla")
    assert "interpreted" not in found


@pytest.mark.parametrize(
    ("target", "dtype", "width"),
    [
        (Target("gpu", chip="a100"), "bfloat16", 64),
        (Target("gpu", chip="h100"), "float32", 64),
        (Target("gpu", chip="h100"), "bfloat16", 512),
        (Target("cpu"), "bfloat16", 64),
    ],
)
def test_mosaic_is_refused_where_it_does_not_serve(target, dtype, width):
    with pytest.raises(
        NotImplementedError, match=r"^flash_kernel=mosaic serves h100, h200, bfloat16, head widths up to"
    ):
        effective(target=target, dtype=dtype, width=width, flash_kernel="mosaic")


def test_long_selections_are_gathered_and_by_no_kernel_with_tiles_of_128_queries():
    assert effective("csa", seq_len=8192)["schedule"] == "stream"
    found = effective("csa", seq_len=32768)
    assert (found["schedule"], found["flash_kernel"]) == ("gather", "triton")
    with pytest.raises(NotImplementedError, match=r"and schedule gather$"):
        effective("csa", csa_schedule="gather", flash_kernel="mosaic")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_kv": 64, "flash_kernel": "triton"}, "block_kv=64: must be left at 0: it has no effect"),
        ({"dq_reduction_steps": 3}, "dq_reduction_steps=3: must be left at 0"),
        ({"block_q": 64, "flash_kernel": "mosaic"}, "block_q=64: must be 0 .* or a multiple of 128"),
        ({"block_q": -1}, "block_q=-1: must be 0"),
    ],
)
def test_what_has_no_effect_or_does_not_fit_is_refused(options, message):
    with pytest.raises(SettingError, match=message):
        effective(**options)


@pytest.mark.parametrize("backend", ["dot_product", "blockwise", "splash"])
def test_no_other_backend_takes_its_kernels(backend):
    attend = lib.Strategy(backend, Kernel(flash_kernel="xla")).attend(KINDS["hca"])
    with pytest.raises(
        SettingError, match=r"flash_kernel='xla': must be left at 'auto': it has no effect with backend="
    ):
        attend.effective(lib.sizes(SEQ_LEN))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", [lib.documents, lib.padding])
def test_ranges_are_the_masks(kind, packing):
    visibility, t = KINDS[kind], np.arange(SEQ_LEN)
    for segments in packing(SEQ_LEN).astype(np.int32):
        starts = np.asarray(joined._document_starts(jnp.asarray(segments[None])))[0]
        found = [(visibility.local_range(t, starts), visibility.local_mask(t[:, None], t, segments[:, None], segments))]
        if visibility.compresses:
            pooled = entry_segments(segments, visibility.ratio)
            c = np.arange(len(pooled))
            mask = visibility.entry_mask(t[:, None], c, segments[:, None], pooled)
            found.append((visibility.entry_range(t, starts), mask))
        for (first, end), mask in found:
            keys = np.arange(mask.shape[1])
            np.testing.assert_array_equal((keys >= first[:, None]) & (keys < end[:, None]), mask)


@pytest.mark.parametrize(("kind", "way"), [("sliding", "auto"), ("hca", "auto"), ("csa", "stream"), ("csa", "gather")])
@pytest.mark.parametrize("logits_bytes", [2**13, 2**15])  # some queries of a sequence at a time; some sequences
def test_sizes_that_are_cut_into_steps_give_the_same(monkeypatch, kind, way, logits_bytes):
    visibility, strategy = KINDS[kind], lib.Strategy("joined", Kernel(way, block_kv=16 if way != "gather" else 0))
    arguments, d_out = lib.inputs(visibility, SEQ_LEN, lib.documents(SEQ_LEN))

    def run():
        return jax.jit(lambda *xs: lib.differentiate(strategy, visibility, *xs)[0])(arguments, d_out)

    monkeypatch.setattr(xla, "LOGITS_BYTES", 2**40)
    monkeypatch.setattr(joined, "_GATHERED_BYTES", 2**40)
    whole = run()
    monkeypatch.setattr(xla, "LOGITS_BYTES", logits_bytes)
    monkeypatch.setattr(joined, "_GATHERED_BYTES", logits_bytes)
    for name, array in run().items():
        if array.size and name in ("out", *DIFFERENTIABLE):
            assert_close(array, whole[name], 1e-5, atol=1e-5)
