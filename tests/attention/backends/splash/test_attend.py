import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from research.attention.attend import Attend, Documents, Sizes, Target
from research.attention.backends.splash import attend as splash_attend
from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash import schedules
from research.attention.backends.splash.schedules import static
from research.attention.visibility import CompressedSparse, HeavilyCompressed, SlidingWindow
from research.errors import SettingError
from research.settings.attention import Kernel
from tests.attention.backends import strategies as lib
from tests.attention.sizes import largest_array

HCA = HeavilyCompressed(100, 128)
DEFAULT = Kernel()
BLOCKS = [field.name for field in dataclasses.fields(Kernel) if field.name.startswith("block_")]


def op(options=DEFAULT, visibility=HCA, target=None) -> Attend:
    return lib.Strategy("splash", options).attend(visibility, target)


def resolve(options=DEFAULT, visibility=HCA, seq_len=600, dtype="bfloat16", packed=True, target=None):
    return op(options, visibility, target).effective(lib.sizes(seq_len, dtype, packed))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({name: size}, rf"{name}={size}: .*multiple of 128") for name in BLOCKS for size in (100, 64, -128)],
        *[({name: 768}, rf"{name}=768: must be at most 640, the padded length of 600 tokens") for name in BLOCKS],
        ({"block_kv": 256, "block_kv_compute": 384}, "block_kv_compute=384: must be a divisor of block_kv=256"),
        ({"block_kv": 384, "block_kv_compute": 256}, "block_kv_compute=256: must be a divisor of block_kv=384"),
        (
            {"block_kv_dkv": 384, "block_kv_dkv_compute": 256},
            "block_kv_dkv_compute=256: must be a divisor of block_kv_dkv=384",
        ),
        ({"dq_reduction_steps": 2}, "dq_reduction_steps=2: must be 0 .* or 3"),
        ({"dq_reduction_steps": -1}, "dq_reduction_steps=-1: must be 0 .* or 3"),
        ({"heads_per_call": 4}, r"heads_per_call=4: must be 0 \(all\) or one of 1, 2"),
        ({"heads_per_call": -1}, r"heads_per_call=-1: must be 0 \(all\) or one of 1, 2"),
        ({"schedule": "lazy"}, f"schedule='lazy': must be auto or one of {', '.join(schedules.TABLE)}"),
    ],
    ids=str,
)
def test_impossible_option_is_named(options, message):
    with pytest.raises(SettingError, match=f"^config.attention.{message}"):
        resolve(Kernel(**options))
    with pytest.raises(SettingError, match=f"^config.attention.{message}"):
        lib.call(op(Kernel(**options)), lib.inputs(HCA, 600)[0])


@pytest.mark.parametrize("schedule", schedules.TABLE)
def test_schedule_that_cannot_express_a_kind_says_which_can(schedule):
    for visibility in lib.visibilities(100, 128).values():
        able = schedules.expressing(visibility.kind)
        if schedule in able:
            assert resolve(Kernel(schedule), visibility)["schedule"] == schedule
        else:
            allowed = f"auto or one of {', '.join(able)}, which can express {visibility.kind}"
            with pytest.raises(SettingError, match=f"^config.attention.schedule='{schedule}': must be {allowed}$"):
                resolve(Kernel(schedule), visibility)


def test_schedules_that_follow_bands_serve_nothing_else():
    class Dilated(HeavilyCompressed):
        bands = False

    able = [name for name, schedule in schedules.TABLE.items() if schedule.expresses(Dilated)]
    assert able == ["captured", "dynamic", "static"]


def test_seed_schedules_cannot_serve_csa():
    for schedule in ("static", "captured"):
        with pytest.raises(
            SettingError, match=f"schedule='{schedule}': must be .*dynamic, hybrid, which can express csa"
        ):
            resolve(Kernel(schedule), CompressedSparse(100, 4, 8))


def test_the_setting_of_the_layers_own_schedule_is_named():
    attend = dataclasses.replace(op(Kernel(csa_schedule="lazy")), schedule_setting="csa_schedule")
    with pytest.raises(SettingError, match=r"^config.attention.csa_schedule='lazy': "):
        attend.effective(lib.sizes(600))


def test_blocks_not_given_follow_the_others():
    def blocks(**options):
        effective = resolve(Kernel(**options), seq_len=1000)
        return [effective[name] for name in BLOCKS]

    assert blocks() == [512, 512, 512, 512, 512, 512]
    assert blocks(block_q=256) == [256, 512, 512, 256, 512, 512]
    assert blocks(block_kv=256) == [512, 256, 256, 512, 256, 256]
    assert blocks(block_kv_dkv=256) == [512, 512, 512, 512, 256, 256]
    assert blocks(block_kv_compute=128) == [512, 512, 128, 512, 512, 512]
    assert blocks(block_kv=256, block_kv_compute=128, block_kv_dkv=512) == [512, 256, 128, 512, 512, 512]


@pytest.mark.parametrize("seq_len", [1, 127, 128, 129, 489, 512, 513])
def test_blocks_fit_any_length(seq_len):
    effective = resolve(seq_len=seq_len)
    assert all(effective[name] % 128 == 0 for name in BLOCKS)
    assert effective["block_q"] == min(512, -(-seq_len // 128) * 128)
    assert seq_len <= effective["q_len"] < seq_len + effective["block_q"]


def partial_sums(options, packed, seq_len=600):
    """Number and dtype of the arrays of dq that the backward kernel writes, read from the program itself."""
    segments = np.zeros((1, seq_len)) if packed else None
    arguments, d_out = lib.inputs(HCA, seq_len, segments, sinks=False, dtype=jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lib.differentiated(lib.Strategy("splash", options), HCA))(arguments, d_out)
    shape = (lib.HEADS, resolve(options, seq_len=seq_len)["q_len"], lib.WIDTH)
    found = {(a.shape[0], a.dtype.name) for a in written(jaxpr.jaxpr) if a.shape[1:] == shape and a.shape[0] > 1}
    assert len(found) == 1
    return found.pop()


def written(jaxpr):
    """What the Pallas kernels of a program return."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield from (variable.aval for variable in equation.outvars)
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from written(inner)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("schedule", schedules.expressing("hca"))
def test_effective_reduction_of_dq_is_that_of_the_program(schedule, steps, packed):
    """With six key blocks, in bfloat16: the ring buffer holds three of q's dtype, all of them are float32."""
    options = Kernel(schedule, block_q=128, block_kv=128, dq_reduction_steps=steps)
    effective = resolve(options, packed=packed)
    ring = steps == 3 or schedules.TABLE[schedule].ring_only or (packed and splash.SEGMENTS_NEED_RING)
    assert effective["dq_reduction_steps"] == (3 if ring else 0)
    assert (effective["dq_partial_sums"], effective["dq_dtype"]) == ((3, "bfloat16") if ring else (6, "float32"))
    assert partial_sums(options, packed) == (effective["dq_partial_sums"], effective["dq_dtype"])


@pytest.mark.parametrize("steps", [0, 3])
def test_few_partial_sums_keep_the_dtype_of_q(steps):
    options = Kernel("static", block_q=512, block_kv=512, dq_reduction_steps=steps)
    effective = resolve(options, packed=False)
    assert (effective["dq_reduction_steps"], effective["dq_partial_sums"]) == (steps, 3)
    assert effective["dq_dtype"] == "bfloat16"
    assert partial_sums(options, packed=False) == (3, "bfloat16")
    assert resolve(options, dtype="float32")["dq_dtype"] == "float32"


def test_only_a_tpu_does_not_interpret():
    for platform, interpreted in (("cpu", True), ("gpu", True), ("tpu", False)):
        assert resolve(target=Target(platform))["interpreted"] is interpreted


def test_interpreted_memory_is_nan_until_written():
    arguments, _ = lib.inputs(HCA, 128)
    program = str(jax.make_jaxpr(lambda a: lib.call(op(), a))(arguments))
    assert "uninitialized_memory='nan'" in program


TPU = [
    pytest.param(
        strategy,
        visibility,
        id=f"{strategy}-{visibility.kind}",
        marks=() if strategy.options.dq_reduction_steps == 0 else pytest.mark.slow,
    )
    for visibility in lib.visibilities(128, 128).values()
    for strategy in lib.strategies(visibility, 1000)
    if strategy.backend == "splash"
]


@pytest.mark.parametrize(("strategy", "visibility"), TPU)
@pytest.mark.parametrize("packed", [False, True])
def test_lowers_for_a_tpu(strategy, visibility, packed):
    """Two kernels, forward and backward, for all heads and sequences of the batch together."""
    segments = np.zeros((2, 1000)) if packed else None
    arguments, d_out = lib.inputs(visibility, 1000, segments, batch=2, dtype=jnp.bfloat16)
    traced = lib.differentiated(strategy, visibility, Target("tpu")).trace(arguments, d_out)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 2


def forward(schedule):
    """Jitted attend, and a list that gets longer whenever it is traced."""
    traces = []

    @jax.jit
    def run(arguments, prepared=None):
        traces.append(None)
        return lib.call(op(Kernel(schedule)), arguments, prepared)

    return run, traces


@pytest.mark.parametrize("schedule", ["closed_form", "dynamic"])
def test_packings_share_one_program(schedule):
    run, traces = forward(schedule)
    arguments, _ = lib.inputs(HCA, 200, np.zeros((1, 200)))
    outs = []
    for start in (0, 1, 100, 128, 199):
        segments = jnp.asarray(np.arange(200)[None] >= start, jnp.int32)
        outs.append(np.asarray(run({**arguments, "segments": segments})))
    assert len(traces) == 1
    assert run._cache_size() == 1
    assert all((one != other).any() for one, other in itertools.combinations(outs, 2))


def test_mask_made_once_for_many_layers_is_the_one_each_would_make():
    run, _ = forward("dynamic")
    arguments, _ = lib.inputs(HCA, 200, lib.documents(200)[:1])
    mask = op(Kernel("dynamic")).prepare(lib.placed(arguments))
    assert mask.dtype == bool
    np.testing.assert_array_equal(run(arguments, mask), run(arguments))


@pytest.mark.parametrize(
    ("visibility", "schedule"),
    [(CompressedSparse(100, 4, 8), "dynamic"), (HCA, "static"), (SlidingWindow(8), "static")],
)
def test_nothing_is_prepared_where_nothing_is_shared(visibility, schedule):
    assert op(Kernel(schedule), visibility).prepare(Documents.whole(1, 200)) is None


def test_static_schedule_is_evaluated_once_for_many_layers(monkeypatch):
    blocks = []
    evaluate = static.LayoutMask.__getitem__
    monkeypatch.setattr(static.LayoutMask, "__getitem__", lambda self, index: blocks.append(0) or evaluate(self, index))
    visibility = HeavilyCompressed(77, 128)  # no other test's
    arguments, _ = lib.inputs(visibility, 256)
    options = Kernel("static", block_q=128, block_kv=128)

    def layers(count):
        def run(arguments):
            for _ in range(count):
                out = lib.call(op(options, visibility), arguments)
                arguments = {**arguments, "q": out}
            return out

        jax.eval_shape(run, arguments)
        return len(blocks)

    once = layers(1)
    assert once > 0
    assert layers(3) == once


@pytest.mark.parametrize("packed", [False, True])  # on which the kernel's ring of partial sums depends
@pytest.mark.parametrize("schedule", [name for name, schedule in schedules.TABLE.items() if schedule.host])
def test_the_hosts_part_is_computed_once_before_tracing_or_in_it(schedule, packed):
    visibility = HCA if schedule in schedules.expressing("hca") else CompressedSparse(100, 4, 24)
    attend = op(Kernel(schedule, schedule), visibility)
    arguments, _ = lib.inputs(visibility, 256, lib.documents(256) if packed else None)
    host = schedules.TABLE[schedule].host
    host.cache_clear()
    sizes = lib.sizes(256, "float32", packed=packed)
    splash_attend.build_host(attend, sizes, attend.effective(sizes))
    for _ in range(2):
        jax.eval_shape(lambda: lib.call(attend, arguments))
    assert host.cache_info().misses == 1


@pytest.mark.parametrize(("schedule", "has_it"), [("dynamic", True), ("hybrid", False)])
def test_only_dynamic_makes_an_array_of_queries_and_keys(schedule, has_it):
    visibility, options = CompressedSparse(100, 4, 24), Kernel(schedule, block_q=128, block_kv=128)
    arguments, _ = lib.inputs(visibility, 1024)

    def gradients(q):
        return jax.grad(lambda q: lib.call(op(options, visibility), {**arguments, "q": q}).sum())(q)

    assert (largest_array(gradients, arguments["q"]) >= 1024 * (1024 + 256)) == has_it


@pytest.mark.parametrize(("heads", "per_call", "allowed"), [(3, 2, "1, 3"), (6, 4, "1, 2, 3, 6"), (2, 3, "1, 2")])
def test_heads_per_call_divides_the_heads_it_serves(heads, per_call, allowed):
    """Where it does not, the last heads' part of the keys' gradient would be counted twice."""
    options = Kernel(heads_per_call=per_call)
    message = rf"heads_per_call={per_call}: must be 0 \(all\) or one of {allowed}, the divisors of the {heads} heads"
    with pytest.raises(SettingError, match=message):
        op(options).effective(Sizes(256, heads, lib.WIDTH, "float32"))
    arguments, _ = lib.inputs(HCA, 256, sinks=False)
    with pytest.raises(SettingError, match=message):
        lib.call(op(options), {**arguments, "q": jnp.zeros((1, 256, heads, lib.WIDTH))})


@pytest.mark.parametrize(("asked", "used"), [(0, 6), (6, 6), (2, 2)])
def test_heads_per_call_is_recorded_as_what_it_became(asked, used):
    options = Kernel(heads_per_call=asked)
    settings = op(options).effective(Sizes(256, 6, lib.WIDTH, "float32"))
    assert settings["heads_per_call"] == used


@pytest.mark.parametrize("order", [("cpu", "tpu", "cpu"), ("tpu", "cpu", "tpu")], ids=" ".join)
def test_each_platform_gets_its_own_program_whatever_was_traced_before(order):
    """One jitted function, whose cache knows the target, for it is an argument."""
    run = jax.jit(lambda arguments, target: lib.call(op(target=target), arguments), static_argnames="target")
    arguments, _ = lib.inputs(HCA, 200)
    for platform in order:
        program = str(run.trace(arguments, target=Target(platform)).jaxpr)
        assert ("InterpretParams" in program) == (platform == "cpu")
        if platform == "cpu":  # of the other there is no device, and the cache must not have it either
            assert np.isfinite(run(arguments, target=Target(platform))).all()
