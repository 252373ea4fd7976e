"""Compiles for a chip that is not there: what a program needs, and whether it fits.

The real compilers run, on abstract arguments; nothing is executed. A process of its own for every program, its
environment set by `ENVIRONMENT`: a crash or a hang loses that program only.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from research import errors, hardware
from research.attention.attend import Documents, Effective
from research.attention.backends.splash import attend as splash
from research.attention.layer.attention import Attention
from research.attention.spec import Spec
from research.measure import launches, roofline, targets
from research.measure.op import Op
from research.measure.program import Program, attention_alone, keep
from research.model import feed_forward, language_model
from research.settings.config import Settings
from research.training import optimizer as optimizer_lib
from research.training import step as step_lib

PHASES = {"op": ("forward", "forward_backward"), "layer": ("forward_backward",), "step": ("update",)}
APART = True
ENVIRONMENT = targets.ENVIRONMENT


def programs(settings: Settings, platform: str = "tpu") -> list[Program]:
    """An op or layer for each kind of attention, a step for the model."""
    del platform
    topology, found = {"topology": settings.aot.topology}, []
    for what in settings.aot.what:
        if what == "step":
            kept = [keep(settings, "model", "experts", "attention", "rope", "optimizer", "train")]
        elif what == "layer":
            alone = [settings.for_kind(kind) for kind in settings.model.kinds]
            kept = [keep(one, "model", "attention", "rope") for one in alone]
        else:
            kept = [attention_alone(settings, kind) for kind in settings.model.kinds]
        found += [Program("aot", what, one.replace(aot=topology)) for one in kept]
    return found


def timeout(settings: Settings) -> float:
    """Seconds for one program."""
    return settings.aot.timeout_minutes * 60


def identify(program: Program) -> dict[str, Any]:
    """See `Program.identify`; and the topology."""
    topology = program.settings.aot.topology
    return program.identify() | {"versions": targets.compilers(topology), "topology": topology}


def rows(program: Program) -> Iterator[dict[str, Any]]:
    """A row per phase, as soon as it is compiled or has failed; bytes, seconds and, labelled as such, the roofline.

    What does not fit the scalar memory is left to the compiler to refuse.
    """
    settings, what = program.settings, program.what
    chip = hardware.topology_chip(settings.aot.topology)
    spec = Spec.make(settings, chip.platform, checks_memory=False, chip=chip.name)
    common = identify(program)
    try:
        start = time.perf_counter()
        effective = _effective(spec, what)
        host_seconds = {"schedule_seconds": time.perf_counter() - start}
        common["effective"] = effective if len(effective) > 1 else next(iter(effective.values()))
        common["schedule"] = "+".join(dict.fromkeys(effective[kind].get("schedule", "") for kind in spec.kinds))
        compiled = {"op": _op, "layer": _layer, "step": _step}[what](spec)
    except Exception as error:
        yield from (common | {"phase": phase, **failure(error)} for phase in PHASES[what])
        return
    for phase in PHASES[what]:
        row, asked = common | {"phase": phase, **host_seconds}, compiled[phase]
        cost = asked.cost
        try:
            row |= _compile(settings.aot.topology, asked, free_layout=what == "op")
            if what != "op":
                cost += roofline.Cost(0, 0, row["argument_bytes"] + row["output_bytes"])
        except Exception as error:
            row |= failure(error)
        yield row | roofline.bound(cost, chip) | {"chip": chip.name}


def failure(error: Exception) -> dict[str, Any]:
    """The columns of a program that was not compiled."""
    columns = {"status": errors.kind(error), "message": str(error)[:2000]}
    if lacked := errors.shortage(str(error)):
        columns |= {"needed_bytes": lacked.needed_bytes, "available_bytes": lacked.available_bytes}
    return columns


def _effective(spec: Spec, what: str) -> dict[str, Effective]:
    """Effective settings by kind of layer, and experts'; builds what schedules the host makes of them, and keeps it."""
    effective = {}
    for kind in spec.kinds:
        attend, sizes = spec.attend(kind), spec.sizes(packed=what == "step")
        effective[kind] = attend.effective(sizes)
        if effective[kind].get("interpreted"):
            raise NotImplementedError(f"{spec.backend}: interpreted kernels run only on a device that is here")
        if spec.backend == "splash":
            splash.build_host(attend, sizes, effective[kind])
    return effective | (feed_forward.effective(spec) if what == "step" else {})


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A program to compile for abstract arguments, of which some are donated, and what it costs by its roofline."""

    function: Callable
    arguments: tuple
    cost: roofline.Cost
    donated: tuple[int, ...] = ()


def _op(spec: Spec) -> dict[str, _Asked]:
    op = Op.make(spec, *spec.kinds)
    arguments, selected = jax.eval_shape(op.arguments)

    def forward_backward(arguments: dict, selected: jax.Array | None, d_out: jax.Array) -> tuple[jax.Array, tuple]:
        out, pull_back = jax.vjp(lambda arguments: op(arguments, selected), arguments)
        return out, pull_back(d_out)

    costs = {phase: roofline.op_cost(op, phase) for phase in PHASES["op"]}
    return {
        "forward": _Asked(op, (arguments, selected), costs["forward"]),
        "forward_backward": _Asked(forward_backward, (arguments, selected, arguments["q"]), costs["forward_backward"]),
    }


def _layer(spec: Spec) -> dict[str, _Asked]:
    settings, (kind,) = spec.settings, spec.kinds
    size = settings.data.batch_size, settings.data.seq_len

    @hk.transform
    def layer(x: jax.Array, positions: jax.Array) -> jax.Array:
        documents = dataclasses.replace(Documents.whole(*size), positions=positions)
        return Attention(spec, kind)(x, documents)[0]

    x = jax.ShapeDtypeStruct((*size, settings.model.hidden), settings.model.dtype)
    positions = jax.ShapeDtypeStruct(size, jnp.int32)
    key = jax.random.key(0)  # on a device that is here
    with _traced_for(settings.aot.topology):
        params = jax.eval_shape(layer.init, key, x, positions)

    def forward_backward(
        params: hk.Params, x: jax.Array, positions: jax.Array, d_out: jax.Array
    ) -> tuple[jax.Array, tuple]:
        out, pull_back = jax.vjp(lambda params, x: layer.apply(params, None, x, positions), params, x)
        return out, pull_back(d_out)

    cost = roofline.attention_cost(spec) + roofline.matrices_cost(spec, params)
    return {"forward_backward": _Asked(forward_backward, (params, x, positions, x), cost)}


def _traced_for(topology: str) -> contextlib.AbstractContextManager[None]:
    """Within it, kernels that ask for the device are told one of the topology. Nothing can be computed there."""
    return jax.default_device(targets.devices(topology)[0])


def _step(spec: Spec) -> dict[str, _Asked]:
    settings, optimizer = spec.settings, optimizer_lib.build(spec)
    state = jax.eval_shape(functools.partial(step_lib.init, spec, optimizer, 0))
    tokens = jax.ShapeDtypeStruct((settings.data.batch_size, settings.data.seq_len), jnp.int32)
    batch = dict.fromkeys(("inputs", "targets", "positions", "segments"), tokens)
    update = step_lib.make_update(spec, language_model.build(spec), optimizer)
    cost = roofline.attention_cost(spec) + roofline.matrices_cost(spec, state.params)
    return {"update": _Asked(update, (state, batch), cost, donated=(0,))}


def _compile(topology: str, asked: _Asked, *, free_layout: bool) -> dict[str, Any]:
    """Lowers and compiles for a device of the topology.

    With `free_layout` a TPU's compiler lays out arguments and results as it likes, as it does inside a model; else, and
    on a GPU, in rows.
    """
    platform = hardware.topology_chip(topology).platform
    placed = SingleDeviceSharding(targets.devices(topology)[0])
    if free_layout and platform == "tpu":
        placed = Format(Layout.AUTO, placed)
    start = time.perf_counter()
    jitted = jax.jit(asked.function, in_shardings=placed, out_shardings=placed, donate_argnums=asked.donated)
    with _traced_for(topology):
        lowered = jitted.trace(*asked.arguments).lower(lowering_platforms=(targets.lowering_platform(topology),))
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    memory = compiled.memory_analysis()
    launched = launches.count(compiled.as_text())._asdict() if platform == "gpu" else {}
    return launched | {
        "lower_seconds": middle - start,
        "compile_seconds": end - middle,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "status": "ok",
    }
