import pathlib

import pytest

from research import errors
from research.attention.spec import Spec
from research.errors import ConfigError
from research.measure import bench, pipeline
from research.measure.op import Op
from research.settings.config import Settings
from research.sweeps import experiment

SIZES = {"window": 8, "hca_ratio": 16, "heads": 2, "head_width": 16}
SETTINGS = Settings().replace(
    model={"layers": ("hca",)},
    attention={"backend": "blockwise", **SIZES},
    data={"seq_len": 64, "batch_size": 1},
    bench={"repeats": 2},
)
(POINT,) = bench.programs(SETTINGS, "cpu")
PHASES = list(bench.PHASES["op"])
EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"


def test_rows_say_what_was_asked_what_took_effect_and_what_it_cost():
    rows = list(bench.rows(POINT))
    assert [row["phase"] for row in rows] == PHASES
    for row in rows:
        assert row["status"] == "ok"
        assert row["requested"]["block_q"] == 0
        assert row["effective"]["block_q"] == 32
        assert row["seconds"] > 0 <= row["seconds_spread"]
        assert row["compile_seconds"] > 0 < row["lower_seconds"]
        assert row["output_bytes"] >= 64 * 2 * 16 * 4
    both, backward = (next(row for row in rows if row["phase"] == name) for name in ("forward_backward", "backward"))
    assert both["temp_bytes"] > 0
    # The backward phase takes what the forward one saved, the cotangent among it, and gives the gradients alone.
    assert backward["argument_bytes"] > both["argument_bytes"]
    assert backward["output_bytes"] == both["output_bytes"]


def test_useful_flops_are_those_of_visible_pairs():
    pairs = sum(min(t + 1, 8) + (t + 1) // 16 for t in range(64))
    op = Op.make(Spec.make(SETTINGS), "hca")
    assert op.useful_flops("forward") == 2 * 2 * pairs * 2 * 16
    assert op.useful_flops("backward") == 5 * 2 * pairs * 2 * 16
    assert op.useful_flops("forward_backward") == 7 * 2 * pairs * 2 * 16


def test_a_phase_that_fails_is_a_row_with_its_kind(monkeypatch):
    def fail(op, phase, repeats):
        raise MemoryError("no room") if phase == "forward" else NotImplementedError("not that")

    monkeypatch.setattr(bench, "measure", fail)
    assert [(row["status"], row["message"]) for row in bench.rows(POINT)] == [
        ("out of memory", "no room"),
        ("unsupported", "not that"),
        ("unsupported", "not that"),
    ]


# As jax 0.10.2 with libtpu 0.0.42.1 and jax 0.12.0.1 with 0.0.50.1 say it, cut short.
RECORDED = [
    (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space smem. Used 1.32M of "
        "1.00M smem. Exceeded smem capacity by 331.6K.\n\nProgram smem requirement 1.32M:\n    scoped            1.32M",
        ("SMEM", round(1.32 * 2**20), 2**20),
    ),
    (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (132.05G) exceeds available HBM (95.73G). HLO module: jit__lambda.\nSee https://openxla.org",
        ("HBM", round(132.05 * 2**30), round(95.73 * 2**30)),
    ),
    (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (132.05G) exceeds "
        "available HBM (95.74G).",
        ("HBM", round(132.05 * 2**30), round(95.74 * 2**30)),
    ),
    (
        "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while allocating "
        "on stack for %splash_mqa_dkv_no_residuals.3 = (bf16[3,8,8192,512]{3,2,1,0:T(8,128)(2,1)}) custom-call(\n"
        "%empty.3). Scoped allocation with size 28.00M and limit 16.00M exceeded scoped vmem limit by 12.00M. It",
        ("VMEM", 28 * 2**20, 16 * 2**20),
    ),
]


@pytest.mark.parametrize(("message", "lacked"), RECORDED)
def test_compilers_say_which_memory_ran_out_and_by_how_much(message, lacked):
    assert errors.shortage(message) == lacked
    assert errors.kind(RuntimeError(message)) == f"out of {lacked[0]}"


def test_memory_that_ran_out_elsewhere_is_not_taken_for_a_chips():
    message = "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"
    assert errors.shortage(message) is None
    assert errors.kind(RuntimeError(message)) == "out of memory"


def test_a_point_that_takes_too_long_is_rows_that_say_so():
    rows = list(pipeline.run(POINT, timeout=0.2))
    assert [row["phase"] for row in rows] == PHASES
    assert {row["status"] for row in rows} == {"over 0 s"}


@pytest.mark.slow
def test_a_point_runs_in_a_process_of_its_own():
    assert [row["status"] for row in pipeline.run(POINT, timeout=120)] == ["ok"] * 3


def test_plan_checks_every_point_before_any_is_run():
    target = f"{EXPERIMENTS}/cpu_attention.py:demo"
    points = [program for program, *_ in pipeline.plan("bench", target, {}, "cpu")]
    assert len(points) == len(set(points)) > 10
    with pytest.raises(ConfigError, match=r"^config\.attention\.window=0: must be positive; so it is at each of the"):
        pipeline.plan("bench", target, {"attention.window": 0}, "cpu")
    with pytest.raises(
        ConfigError, match=r"config\.attention\.windoww: no such field; the nearest are attention\.window"
    ):
        pipeline.plan("bench", target, {"attention.windoww": 8}, "cpu")


def test_report_is_of_one_run():
    module, _ = experiment.load(f"{EXPERIMENTS}/cpu_attention.py")
    common = {
        "phase": "forward_backward",
        "status": "ok",
        "requested": {"block_q": 0, "schedule": "auto"},
        "useful_flops": 1,
        "useful_flops_per_second": 1.0,
    }
    rows = [
        common
        | {"visibility": "hca", "backend": backend, "seq_len": seq_len, "seconds": seconds, "temp_bytes": 1 << bits}
        | {"matmul_flops_per_second": 4.0}
        for backend, seq_len, seconds, bits in (
            ("dot_product", 1024, 8.0, 12),
            ("blockwise", 1024, 2.0, 10),
            ("blockwise", 2048, 8.0, 11),
        )
    ]
    lines = module.report(rows)
    assert lines[0] == "hca at 1,024: dot_product takes 4.00x the time and 4.00x the temporaries of blockwise"
    assert lines[1] == "hca 1,024 to 2,048: time ^2.00, temporaries ^1.00, visible pairs ^0.00"
    assert lines[2] == "hca at 1,024: useful FLOP/s are 25% of this machine's own product of matrices"
