"""Points and their rooflines without a compiler; and, with libtpu installed, what the real ones say."""

import importlib.util

import numpy as np
import pytest

from research import hardware
from research.attention.attend import Attend, Sizes, Target
from research.attention.spec import Spec
from research.attention.visibility import CompressedSparse, HeavilyCompressed, SlidingWindow
from research.errors import ConfigError
from research.measure import aot, pipeline, roofline, search, targets
from research.measure.op import Op
from research.settings import fields
from research.settings.attention import Kernel
from research.settings.config import base_config, read
from research.validation import validate
from tests.oracles import visible

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: requirements-tpu.txt"
)
GROUPS = {"attention.heads": 2, "attention.head_width": 128, "model.hidden": 64, "data.batch_size": 1}


def config_of(**overrides):
    config = base_config()
    names = {name.replace("__", "."): value for name, value in overrides.items()}
    fields.override(config, GROUPS | {"model.dtype": "bfloat16"} | names)
    return read(config)


def points(**overrides):
    return aot.programs(config_of(**overrides))


def fake_versions(*packages):
    return dict.fromkeys(packages, "1")


@pytest.fixture
def versions(monkeypatch):
    monkeypatch.setattr(targets, "versions", fake_versions)


def test_ops_and_layers_are_points_by_kind_and_a_step_is_one():
    found = points(model__layers=("hca", "csa", "hca"), aot__what=("op", "layer", "step"))
    layers = [point.settings.model.layers for point in found]
    assert list(zip([point.what for point in found], layers, strict=True)) == [
        ("op", ("hca",)),
        ("op", ("csa",)),
        ("layer", ("hca",)),
        ("layer", ("csa",)),
        ("step", ("hca", "csa", "hca")),
    ]


def test_a_point_is_the_same_whatever_does_not_concern_it():
    assert points(optimizer__learning_rate=1e-4) == points()
    assert points(optimizer__learning_rate=1e-4, aot__what=("step",)) != points(aot__what=("step",))
    assert points(attention__heads_per_call=1) != points()


def test_key_tells_points_and_versions_apart(versions, monkeypatch):
    (first,), (second,) = points(model__layers=("hca",)), points(model__layers=("hca",), data__seq_len=1024)
    keys = {pipeline.key(first), pipeline.key(second)}
    monkeypatch.setattr(targets, "versions", lambda *packages: fake_versions(*packages) | {"libtpu": "4"})
    assert len(keys | {pipeline.key(first)}) == 3


def test_a_point_holds_the_settings_that_matter():
    (point,) = points(model__layers=("csa",), attention__top_k=7, data__seq_len=2048)
    settings = point.settings
    assert (settings.attention.top_k, settings.data.seq_len, settings.model.layers) == (7, 2048, ("csa",))


def test_chips_are_devices_as_jax_shows_them():
    by_name = {chip.name: chip for chip in hardware.CHIPS.values()}
    assert by_name["v5p"].flops == 459e12
    assert by_name["v5p"].hbm_bytes == 95 * 2**30
    assert by_name["tpu7x"].bandwidth == 3690e9  # half a chip
    assert hardware.find_chip("TPU v6 lite").name == "v6e"
    assert hardware.find_chip("cpu") is None


@pytest.mark.parametrize("visibility", [SlidingWindow(100), HeavilyCompressed(128, 128)])
def test_scheduled_flops_are_those_of_the_blocks_that_hold_a_visible_pair(visibility):
    options = Kernel("closed_form", block_q=128, block_kv=128, dq_reduction_steps=3)
    attend = Attend("splash", visibility, options, Target("tpu"))
    cost = roofline.op_cost(Op(attend, Sizes(640, 2, 16, "bfloat16", packed=False), 1), "forward")
    pairs = visible(visibility, np.zeros(640, int))
    entries = np.pad(pairs[:, 640:], ((0, 0), (0, -pairs[:, 640:].shape[1] % 128)))
    columns = np.concatenate([pairs[:, :640], entries], axis=1)
    blocks = columns.reshape(5, 128, -1, 128).any(axis=(1, 3)).sum()
    assert cost.scheduled_flops == 2 * 2 * blocks * 128 * 128 * 16 * 2
    assert cost.useful_flops == 2 * 2 * pairs.sum() * 16 * 2
    assert cost.moved_bytes >= 2 * (2 * 640 * 16 + blocks * 2 * 128 * 16) * 2  # q, out, and keys as keys and values


def test_dense_attention_schedules_every_pair():
    attend = Attend("dot_product", CompressedSparse(8, 4, 3), Kernel(), Target("cpu"))
    cost = roofline.op_cost(Op(attend, Sizes(64, 2, 16, "float32"), 2), "forward_backward")
    assert cost.scheduled_flops == 7 * 2 * 64 * (64 + 16) * 16 * 2 * 2


def test_the_slower_side_bounds():
    chip = hardware.Chip("one", "tpu", flops=10.0, bandwidth=2.0, hbm_bytes=1)
    slow = roofline.bound(roofline.Cost(30.0, 5.0, 4.0), chip)
    assert (slow["roofline_seconds"], slow["bound"]) == (3.0, "compute")
    assert roofline.bound(roofline.Cost(30.0, 5.0, 8.0), chip)["bound"] == "memory"


def test_matrices_meet_every_token_and_vectors_none():
    params = {"a": {"w": np.zeros((3, 5)), "scale": np.zeros(5)}, "a/indexer": {"w": np.zeros((2, 2))}}
    size = {"data__seq_len": 10, "data__chunk_len": 0}
    learns = {
        weight: Spec.make(config_of(attention__indexer_loss_weight=weight, **size), "tpu") for weight in (1.0, 0.0)
    }
    flops = {weight: roofline.matrices_cost(spec, params).scheduled_flops for weight, spec in learns.items()}
    assert flops == {1.0: 2 * 10 * (15 + 4) * 3, 0.0: 2 * 10 * (15 * 3 + 4)}
    params = {"embed": {"embeddings": np.zeros((3, 5))}}
    heads = {tied: Spec.make(config_of(model__tied_head=tied, **size), "tpu") for tied in (True, False)}
    found = {tied: roofline.matrices_cost(spec, params).scheduled_flops for tied, spec in heads.items()}
    assert found == {True: 2 * 10 * 15 * 3, False: 0}


def row(peak, seconds, compile_seconds, **others):
    numbers = {"peak_bytes": peak, "roofline_seconds": seconds, "compile_seconds": compile_seconds}
    return {"status": "ok", "phase": "forward_backward", **numbers, **others}


def test_front_holds_what_nothing_beats():
    best, small, quick = row(10, 1.0, 5.0), row(5, 2.0, 5.0), row(20, 3.0, 1.0)
    rows = [row(10, 1.5, 5.0), small, quick, best, row(1, 0.1, 0.1, status="out of HBM")]
    assert search.front([*rows, row(1, 0.1, 0.1, phase="forward")]) == [best, small, quick]


def test_search_tries_legal_blocks_and_groups():
    planned = search.plan(config_of(model__layers=("hca",), attention__backend="splash", data__seq_len=1024))
    assert len({program for program, *_ in planned}) == len(planned) == 4 * 4 * 2
    assert {overrides["attention.heads_per_call"] for _, overrides, _ in planned} == {0, 1}
    assert all(overrides["attention.block_q"] <= 1024 for _, overrides, _ in planned)


def test_search_wants_one_kind_of_splash():
    with pytest.raises(ConfigError, match=r"config\.model\.layers=.*: must be of one kind"):
        search.plan(config_of(attention__backend="splash"))
    with pytest.raises(ConfigError, match=r"config\.attention\.backend='blockwise': must be splash"):
        search.plan(config_of(model__layers=("hca",), attention__backend="blockwise"))


def test_what_a_crash_swallowed_is_rows_that_say_so(versions, monkeypatch):
    (point,) = points(model__layers=("hca",))
    monkeypatch.setattr(pipeline.apart, "run", lambda *_: pipeline.apart.Outcome([], "killed by SIGSEGV", "the end"))
    rows = list(pipeline.run(point, 1.0))
    assert [(row["phase"], row["status"]) for row in rows] == [
        ("forward", "killed by SIGSEGV"),
        ("forward_backward", "killed by SIGSEGV"),
    ]


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(("kind", "what"), [("hca", "op"), ("csa", "op"), ("hca", "layer"), ("csa", "step")])
def test_compiles_for_a_chip(topology, kind, what):
    (point,) = points(model__layers=(kind,), aot__what=(what,), aot__topology=topology, data__seq_len=512)
    rows = list(pipeline.run(point, timeout=300))
    assert [row["status"] for row in rows] == ["ok"] * len(aot.PHASES[what]), rows[0].get("message")
    for row in rows:
        assert row["chip"] == topology.partition(":")[0]
        assert row["peak_bytes"] >= row["output_bytes"] > 0 < row["compile_seconds"]
        assert row["roofline_seconds"] > 0


@needs_libtpu
def test_a_kernel_beyond_its_vector_memory_says_so():
    tight = points(model__layers=("hca",), attention__vmem_limit_kib=512, data__seq_len=1024)
    rows = list(pipeline.run(tight[0], timeout=300))
    assert rows[-1]["status"] == "out of VMEM"
    assert rows[-1]["needed_bytes"] > rows[-1]["available_bytes"] == 512 * 1024


@needs_libtpu
def test_the_compiler_refuses_the_lists_that_we_would():
    asked = {"attention__schedule": "dynamic", "attention__backend": "splash", "attention__block_q": 128}
    (point,) = points(model__layers=("sliding",), data__seq_len=32768, attention__block_kv=128, **asked)
    rows = list(pipeline.run(point, timeout=300))
    assert {row["status"] for row in rows} == {"out of SMEM"}
    with pytest.raises(ConfigError, match=r"of scalar memory, a TPU core has"):
        validate(point.settings, "tpu")
