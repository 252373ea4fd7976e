"""The closed form against tokamax's own evaluation of every block."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash import layout as layout_lib
from research.attention.backends.splash.schedules import block_schedule, closed_form, hybrid
from research.attention.backends.splash.schedules.static import LayoutMask
from research.attention.visibility import CompressedSparse, HeavilyCompressed, SlidingWindow

DANGEROUS = (1, 3, 127, 128, 129, 255, 382, 489, 509, 636, 1017, 1525)


def random_cases(count, seed):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        window = int(rng.choice([1, 2, 7, 64, 127, 128, 129, 200, 500, 4000]))
        # From 2 on: at a ratio of 1 a partial block of entries can look like one of local keys, and tokamax shares it.
        ratio = int(rng.choice([2, 3, 4, 8, 16, 60, 128, 200, 512, 1000]))
        visibility = HeavilyCompressed(window, ratio) if rng.random() < 0.75 else SlidingWindow(window)
        yield visibility, int(rng.integers(1, 1400)), 128 * int(rng.integers(1, 5)), 128 * int(rng.integers(1, 5))


def dangerous_cases():
    for seq_len in DANGEROUS:
        for block_q, block_kv in ((128, 128), (512, 512), (128, 512), (512, 128)):
            yield HeavilyCompressed(128, 128), seq_len, block_q, block_kv
            yield SlidingWindow(128), seq_len, block_q, block_kv


def assert_same(info, schedule, dynamic_grid):
    mine = closed_form.mask_info(schedule, dynamic_grid)
    for name in ("active_rows", "active_cols", "block_mask", "num_active_blocks"):
        theirs = getattr(info, name)
        if theirs is None:
            assert getattr(mine, name) is None, name
        else:
            assert getattr(mine, name).dtype == theirs.dtype, name
            np.testing.assert_array_equal(getattr(mine, name), theirs, err_msg=name)
    blocks = schedule.partial_blocks()
    assert blocks.dtype == info.partial_mask_blocks.dtype
    assert blocks.shape == info.partial_mask_blocks.shape
    # The numbering is free: what is fetched for each block must be the same, and nothing held twice.
    assert mine.mask_next.dtype == info.mask_next.dtype
    np.testing.assert_array_equal(blocks[mine.mask_next], info.partial_mask_blocks[info.mask_next])
    assert len({block.tobytes() for block in blocks}) == len(blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(random_cases(60, seed=0), id="random"),
        pytest.param(random_cases(300, seed=1), id="more of them", marks=pytest.mark.slow),
        pytest.param(dangerous_cases(), id="dangerous"),
    ],
)
def test_equals_the_evaluation_of_every_block(cases):
    for visibility, seq_len, block_q, block_kv in cases:
        layout = layout_lib.make(visibility, seq_len, (block_q,), (block_kv,))
        evaluated = {"mask": LayoutMask(layout), "block_shape": (block_q, block_kv)}
        info, _ = splash.process_mask(**evaluated, is_dkv=False)
        assert_same(info, block_schedule.build(layout, block_q, block_kv, transposed=False), dynamic_grid=True)

        backward = block_schedule.build(layout, block_q, block_kv, transposed=True)
        backward = block_schedule.with_empty_rows(backward, layout.kv_len // block_kv)
        for dynamic_grid in (True, False):
            info, _ = splash.process_mask(**evaluated, is_dkv=True, return_dynamic_grid=dynamic_grid)
            assert_same(info, backward, dynamic_grid)


@pytest.mark.parametrize("block", [512, 1024])
def test_distinct_partial_blocks_do_not_grow_with_the_sequence(block):
    counts = []
    for seq_len in (131_072, 1_048_576):
        layout = layout_lib.make(HeavilyCompressed(128, 128), seq_len, (block,), (block,))
        counts.append(len(block_schedule.build(layout, block, block, transposed=False).offsets))
    bound = (2 * block + 128) / block + (block + block * 128) / math.gcd(block, block * 128)
    assert counts[0] == counts[1] == 130 <= bound


def test_active_blocks_of_a_million_tokens():
    layout = layout_lib.make(HeavilyCompressed(128, 128), 1_048_576, (512,), (512,))
    schedule = block_schedule.build(layout, 512, 512, transposed=False)
    # 2,048 diagonal blocks, 2,047 left of them, and of entries one more column for every 128 blocks of queries.
    assert len(schedule.rows) == 2048 + 2047 + 128 * sum(range(1, 17)) == 21_503


def evaluated(info, layout, block_q, block_kv, *, transposed):
    """The mask that a `MaskInfo` stands for, bool [q_len, kv_len], block by block."""
    down, across = layout.q_len // block_q, layout.kv_len // block_kv
    if info.active_rows is None:
        rows, cols = np.unravel_index(np.arange(down * across), (across, down) if transposed else (down, across))
    else:
        rows, cols = np.asarray(info.active_rows), np.asarray(info.active_cols)
    kinds, numbers = np.asarray(info.block_mask), np.asarray(info.mask_next)
    blocks = np.asarray(info.partial_mask_blocks).astype(bool)
    mask, visited = np.zeros((layout.q_len, layout.kv_len), bool), set()
    for row, col, kind, number in zip(rows, cols, kinds, numbers, strict=True):
        q, kv = (int(col), int(row)) if transposed else (int(row), int(col))
        visited.add((q, kv))
        content = {0: False, 1: blocks[number].T if transposed else blocks[number], 2: True}[int(kind)]
        mask[q * block_q : (q + 1) * block_q, kv * block_kv : (kv + 1) * block_kv] = content
    assert len(visited) == len(rows)
    return mask


@pytest.mark.slow
@pytest.mark.parametrize("steps", [None, 3])
def test_hybrid_holds_the_indexers_choice(steps):
    rng = np.random.default_rng(1)
    skipped = 0
    for seq_len in (3, 129, 489, 1017, *rng.integers(1, 1400, 3).tolist()):
        block_q, block_kv = (128 * rng.integers(1, 4, 2)).tolist()
        visibility = CompressedSparse(int(rng.choice([1, 64, 128, 500])), int(rng.choice([2, 4, 16])), top_k=8)
        layout = layout_lib.make(visibility, seq_len, (block_q,), (block_kv,))
        config = splash.SplashConfig(
            block_q=block_q, block_kv=block_kv, block_q_dkv=block_q, block_kv_dkv=block_kv, dq_reduction_steps=steps
        )
        # So few that some blocks hold none, and of entries that are not complete too: those are not to be attended.
        selected = jnp.asarray(rng.random((seq_len, layout.entries)) < 4e-5)
        kernel = hybrid.kernel(layout, config, selected)
        expected = np.asarray(layout.runtime_mask(None, None, selected))
        for info, transposed in ((kernel.fwd_mask_info, False), (kernel.dkv_mask_info, True)):
            mask = evaluated(info, layout, block_q, block_kv, transposed=transposed)
            np.testing.assert_array_equal(mask, expected)
        skipped += np.count_nonzero(np.asarray(kernel.fwd_mask_info.block_mask) == 0)
    assert skipped > 0
