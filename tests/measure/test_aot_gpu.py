"""Launches counted from HLO; and, with jax's plugin for CUDA installed, what the compiler for GPUs says."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from research.errors import ConfigError
from research.measure import aot, launches, pipeline, targets
from research.measure.launches import Launches
from research.settings import fields
from research.settings.config import base_config, read

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax's plugin for CUDA is not installed: requirements-gpu-aot.txt",
)
# A loop of three trips, each with two launches and an inner loop of unknown length; a branch; a call; a copy.
HLO = """
HloModule m, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %e = f32[8]{0} exponential(%p)
}

%inner_body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %f = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[8]{0}) tuple(%x, %f)
}

%inner_cond (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  ROOT %c = pred[] fusion(%p), kind=kLoop, calls=%fused
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %w = (s32[], f32[8]{0}) while(%p), condition=%inner_cond, body=%inner_body
  %x = f32[8]{0} get-tuple-element(%w), index=1
  %g = (f32[8]{0}, s8[16]{0}) custom-call(%x), custom_call_target="__cublas$gemm"
  ROOT %t = (s32[], f32[8]{0}) tuple(%x, %g)
}

%cond (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  ROOT %c = pred[] fusion(%p), kind=kLoop, calls=%fused
}

%long (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %f = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused
  ROOT %g = f32[8]{0} fusion(%f), kind=kLoop, calls=%fused
}

%short (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}

%command_buffer (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %f = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused
}

ENTRY %main (a: f32[8], i: s32[]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %t = (s32[], f32[8]{0}) tuple(%z, %a)
  %w = (s32[], f32[8]{0}) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %x = f32[8]{0} get-tuple-element(%w), index=1
  %b = f32[8]{0} conditional(%i, %x, %x), branch_computations={%short, %long}
  %y = f32[8]{0} call(%b), to_apply=%command_buffer
  %s = ((f32[8]{0}), f32[8]{0}) copy-start(%y)
  ROOT %d = f32[8]{0} copy-done(%s)
}
"""


def points(**overrides):
    config = base_config()
    small = {"attention.heads": 8, "attention.head_width": 64, "model.dtype": "bfloat16", "data.batch_size": 1}
    names = {name.replace("__", "."): value for name, value in overrides.items()}
    fields.override(config, small | {"aot.topology": "h100:1", "data.seq_len": 512} | names)
    return aot.programs(read(config))


def test_launches_of_loops_branches_and_calls_are_counted():
    # Of the outer loop each trip: its condition, a library's product, and the inner loop's one trip of two.
    assert launches.count(HLO) == Launches(kernels=3 * (1 + 1 + 2) + 2 + 1 + 1, loop_trips=3 * (1 + 1), unknown_loops=1)


@pytest.mark.parametrize("topology", ["h100:0", "h100:9", "a100:two", "h200:", "b200:1x1"])
def test_a_topology_of_gpus_that_no_host_has_is_named(topology):
    (point,) = points(model__layers=("hca",), aot__topology=topology)
    with pytest.raises(
        ConfigError, match=rf"config\.aot\.topology='{topology}': must be CHIP or CHIP:N, with N from 1"
    ):
        targets.check(point.settings)


@needs_plugin
@pytest.mark.parametrize(
    ("topology", "kind", "what"),
    [
        ("h100:1", "hca", "op"),
        ("h100:1", "csa", "layer"),
        ("h100:1", "csa", "step"),
        ("a100:1", "csa", "op"),
        ("h200", "hca", "op"),
        ("b200", "hca", "op"),
    ],
)
def test_compiles_for_a_gpu(topology, kind, what):
    (point,) = points(model__layers=(kind,), aot__what=(what,), aot__topology=topology)
    rows = list(pipeline.run(point, timeout=300))
    assert [row["status"] for row in rows] == ["ok"] * len(aot.PHASES[what]), rows[0].get("message")
    for row in rows:
        assert row["chip"] == topology.partition(":")[0]
        assert row["peak_bytes"] >= row["output_bytes"] > 0 < row["compile_seconds"]
        assert row["roofline_seconds"] > 0 < row["kernels"]
        assert row["versions"]["jax-cuda13-plugin"] == row["versions"]["jax"] == jax.__version__


@needs_plugin
@pytest.mark.parametrize(
    ("topology", "kind", "kernel"),
    [
        ("h100:1", "hca", "mosaic"),
        ("h100:1", "csa", "mosaic"),
        ("h100:1", "csa", "triton"),
        ("a100:1", "hca", "triton"),
    ],
)
def test_a_joined_attention_is_a_few_kernels_and_no_loop(topology, kind, kernel):
    asked = {"attention__flash_kernel": kernel, "attention__backend": "joined", "attention__top_k": 512}
    (point,) = points(model__layers=(kind,), aot__topology=topology, data__seq_len=8192, **asked)
    row = list(pipeline.run(point, timeout=300))[-1]
    assert row["status"] == "ok", row.get("message")
    assert (row["loop_trips"], row["unknown_loops"]) == (0, 0)
    assert row["kernels"] <= 30 + 5 * (topology == "a100:1")
    assert row["effective"]["flash_kernel"] == kernel


@needs_plugin
@pytest.mark.parametrize(("topology", "kernel"), [("h100:1", "mosaic"), ("a100:1", "triton")])
def test_the_kernel_that_is_chosen_is_the_chips(topology, kernel):
    (point,) = points(model__layers=("hca",), aot__topology=topology)
    assert {row["effective"]["flash_kernel"] for row in pipeline.run(point, timeout=300)} == {kernel}


@needs_plugin
def test_a_kernel_that_does_not_serve_the_chip_is_a_row_that_says_so():
    (point,) = points(model__layers=("hca",), aot__topology="a100:1", attention__flash_kernel="mosaic")
    for row in pipeline.run(point, timeout=300):
        assert row["status"] == "unsupported"
        assert row["message"].startswith("flash_kernel=mosaic serves h100, h200, bfloat16, head widths up to 256")


@needs_plugin
def test_launches_of_a_compiled_loop_are_those_that_it_asks_for():
    placed = SingleDeviceSharding(targets.devices("h100:1")[0])

    def hlo(trips):
        def program(x):
            return jax.lax.fori_loop(0, trips, lambda _, y: jnp.sort(jnp.sin(y @ x), axis=0), x)

        x = jax.ShapeDtypeStruct((256, 256), np.float32)
        lowered = jax.jit(program, in_shardings=placed, out_shardings=placed).trace(x)
        return lowered.lower(lowering_platforms=("cuda",)).compile().as_text()

    counted = {trips: launches.count(hlo(trips)) for trips in (50, 100)}
    assert {trips: found.loop_trips for trips, found in counted.items()} == {50: 50, 100: 100}
    grown = counted[100].kernels - counted[50].kernels
    assert grown % 50 == 0 < grown


@needs_plugin
def test_several_gpus_are_one_topology():
    assert len(targets.devices("h100:8")) == 8
