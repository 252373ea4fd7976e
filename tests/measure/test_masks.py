import numpy as np
import pytest

from research.attention.attend import Attend, Sizes, Target
from research.attention.backends.splash import schedules
from research.attention.visibility import CompressedSparse, HeavilyCompressed, SlidingWindow
from research.measure import masks
from research.settings.attention import Kernel
from research.settings.config import Settings
from tests.oracles import visible

HCA = HeavilyCompressed(128, 128)


def measure(kind, schedule, seq_len, block):
    name = "csa_schedule" if kind == "csa" else "schedule"
    attention = {"backend": "splash", name: schedule, "block_q": block, "block_kv": block, "dq_reduction_steps": 3}
    attention |= {"top_k": 512}
    settings = Settings().replace(model={"layers": (kind,)}, attention=attention, data={"seq_len": seq_len})
    (program,) = masks.programs(settings)
    return masks.measure(program)


@pytest.mark.parametrize("schedule", schedules.expressing("hca"))
def test_schedules_of_one_mask_have_the_same_blocks(schedule):
    row = measure("hca", schedule, 1017, 128)
    # 8 diagonal blocks, 7 left of them, and the column of entries from the first that is complete.
    assert (row["active"], row["full"], row["partial"]) == (23, 0, 23)
    assert row["useful_fraction"] == HCA.pairs(1017) / (23 * 128 * 128)
    assert row["build_seconds"] >= row["schedule_seconds"] > 0


@pytest.mark.parametrize("visibility", [SlidingWindow(8), HeavilyCompressed(8, 16), CompressedSparse(8, 4, 3)])
def test_visible_pairs_are_those_of_the_oracle(visibility):
    everything = np.ones((100, visibility.num_entries(100)), bool) if visibility.selects else None
    assert visibility.pairs(100) == visible(visibility, np.zeros(100, np.int32), everything).sum()


@pytest.mark.parametrize("seq_len", [98_304, 114_688])
def test_scalar_memory_runs_out_where_the_compiler_says(seq_len):
    """The v5p compiler takes dynamic HCA at block 512 up to 98,304 tokens, and lacks 20.7 KiB at 114,688."""
    options, sizes = Kernel("dynamic", block_q=512, block_kv=512), Sizes(seq_len, 2, 128, "bfloat16")
    attend = Attend("splash", HCA, options, Target("tpu"))
    if seq_len == 98_304:
        attend.effective(sizes)
    else:
        with pytest.raises(
            ValueError, match=r"schedule='dynamic': must be .*the list of 50,624 blocks.*takes 1,0\d\d KiB"
        ):
            attend.effective(sizes)
    # It is the compiler's to refuse.
    assert Attend("splash", HCA, options, Target("tpu", checks_memory=False)).effective(sizes)


def test_points_that_come_to_the_same_are_one_program():
    def programs(**attention):
        return masks.programs(
            Settings().replace(model={"layers": ("hca",)}, attention={"backend": "splash", **attention})
        )

    assert programs() == programs(schedule="closed_form", block_q=512, heads_per_call=0)
    assert programs() != programs(block_q=128)
    assert masks.programs(Settings().replace(attention={"backend": "blockwise"})) == []


@pytest.mark.slow
def test_hybrid_holds_no_mask_of_local_keys():
    dynamic, hybrid = (measure("csa", name, 4096, 256) for name in ("dynamic", "hybrid"))
    assert hybrid["active"] == dynamic["active"]
    assert hybrid["scheduled"] < dynamic["scheduled"] / 2
    # Of the entries half, forward and backward, and two blocks each of local keys; beside all pairs thrice.
    assert hybrid["hbm_bytes"] == 2 * (40 * 256 * 256 + 2 * 256 * 256)
    assert dynamic["hbm_bytes"] == 3 * 4096 * (4096 + 1024) > 4 * hybrid["hbm_bytes"]
