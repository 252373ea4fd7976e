"""Compiles for a TPU that is not there: `python -m research.measure.aot POINT.json` prints a JSON row per program.

The real compilers run, on abstract arguments, and answer what a program needs and whether it fits; nothing is executed.
A process of its own for every point, its environment set by `environment`: a crash or a hang loses that point only.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from research import config as config_lib
from research import errors, fields, hardware
from research.attention import backends
from research.attention.backends.splash import attend, schedules
from research.attention.layer.attention import Attention
from research.measure import apart, op, roofline
from research.model import language_model
from research.model import spec as model_spec
from research.sweeps import sweep
from research.training import optimizer as optimizer_lib
from research.training import step as step_lib

PHASES = {"op": ("forward", "forward_backward"), "layer": ("forward_backward",), "step": ("update",)}
_GROUPS = {"op": ("model", "attention"), "layer": ("model", "attention", "rope")}
_GROUPS["step"] = (*_GROUPS["layer"], "optimizer", "train")


@dataclasses.dataclass(frozen=True)
class Point:
    """What to compile.

    Attributes:
      topology: as `config.aot.topology`; the program is for one of its devices.
      what: op (one attention), layer (with its projections) or step (an update of the model).
      batch: sequences.
      seq_len: tokens of a sequence.
      settings: JSON of the groups of the config that matter to `what`.
    """

    topology: str
    what: str
    batch: int
    seq_len: int
    settings: str

    def key(self) -> str:
        """Names the point and the versions that compile it."""
        text = json.dumps(dataclasses.asdict(self) | versions(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def config(self) -> ml_collections.ConfigDict:
        """A full config in which the point's settings hold."""
        config = config_lib.base_config()
        for group, settings in json.loads(self.settings).items():
            config[group].update(settings)
        config.data.seq_len, config.data.batch_size = self.seq_len, self.batch
        return config


def plan(target: str, common: fields.Overrides) -> list[tuple[fields.Overrides, Point, float]]:
    """The distinct points of an experiment's sweep, each with its overrides and time-out in seconds.

    Raises:
      ConfigError: a point is invalid; names every such point. Lists that do not fit the scalar memory are no error.
    """
    points = {}
    for overrides, config in sweep.configs(target, common, "tpu", checks_memory=False):
        for point in of_config(config):
            points.setdefault(point, (overrides, point, config.aot.timeout_minutes * 60))
    return list(points.values())


def chip_of(topology: str) -> hardware.Chip:
    """The chip in the name of a topology."""
    return next(chip for chip in hardware.CHIPS.values() if chip.name == topology.partition(":")[0])


def of_config(config: ml_collections.ConfigDict) -> list[Point]:
    """The points of a config: an op or layer for each kind of attention, a step for the model."""
    points = []
    for what in config.aot.what:
        patterns = (
            [tuple(config.model.layers)] if what == "step" else [(k,) for k in dict.fromkeys(config.model.layers)]
        )
        for layers in patterns:
            settings = {group: config[group].to_dict() for group in _GROUPS[what]}
            settings["model"] |= {"layers": layers} | ({} if what == "step" else {"repeats": 1})
            if what == "op":
                settings["model"] = {name: settings["model"][name] for name in ("layers", "dtype")}
            size = (config.data.batch_size, config.data.seq_len)
            text = json.dumps(settings, sort_keys=True)
            points.append(Point(config.aot.topology, what, *size, text))
    return points


def versions() -> dict[str, str]:
    """Of the packages that make the program."""
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu", "tokamax")}


def environment() -> dict[str, str]:
    """Variables to be set before jax is imported, for libtpu to load where no TPU is, and more than once."""
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def rows(point: Point) -> Iterator[dict[str, Any]]:
    """A row per phase, as soon as it is compiled or has failed; bytes, seconds and, labelled as such, the roofline.

    Needs `environment`. What does not fit the scalar memory is left to the compiler to refuse.
    """
    device = topologies.get_topology_desc(platform="tpu", topology_name=point.topology).devices[0]
    config = point.config()
    spec = model_spec.from_config(config, "tpu", checks_memory=False)
    common, host_seconds = identify(point), {}
    try:
        effective, host_seconds = _resolve(point, spec)
        common["effective"] = effective if len(effective) > 1 else next(iter(effective.values()))
        common["schedule"] = "+".join(dict.fromkeys(e.get("schedule", "") for e in effective.values()))
        build = {"op": _op, "layer": _layer, "step": _step}[point.what]
        programs = build(point, config, spec, effective)
    except Exception as error:
        yield from (common | {"phase": phase, **failure(error)} for phase in PHASES[point.what])
        return
    for phase in PHASES[point.what]:
        row = common | {"phase": phase, **host_seconds}
        program, arguments, donated, cost = programs[phase]
        try:
            row |= _compile(device, program, arguments, donated, free_layout=point.what == "op")
            if point.what != "op":
                cost += roofline.Cost(0, 0, row["argument_bytes"] + row["output_bytes"])
        except Exception as error:
            row |= failure(error)
        chip = chip_of(point.topology)
        yield row | roofline.bound(cost, chip) | {"chip": chip.name}


def identify(point: Point) -> dict[str, Any]:
    """What every row of a point says of it, also when nothing came of it."""
    settings = json.loads(point.settings)
    attention = settings["attention"]
    return {
        "key": point.key(),
        "topology": point.topology,
        "what": point.what,
        "visibility": "+".join(settings["model"]["layers"]),
        "backend": attention["backend"],
        "schedule": attention["schedule"],
        "batch": point.batch,
        "seq_len": point.seq_len,
        "heads": attention["heads"],
        "head_width": attention["head_width"],
        "dtype": settings["model"]["dtype"],
        "requested": {name: attention[name] for name in ("csa_schedule", *backends.Options.__dataclass_fields__)},
        "versions": versions(),
    }


def run(point: Point, timeout: float) -> list[dict[str, Any]]:
    """`rows` from a process of its own; programs that a crash or the time-out, in seconds, swallowed say so."""
    text = json.dumps(dataclasses.asdict(point))
    found, ending, message = apart.run("research.measure.aot", text, timeout, environment())
    known = {row["phase"] for row in found}
    lost = identify(point) | {"status": ending, "message": message}
    return found + [lost | {"phase": phase} for phase in PHASES[point.what] if phase not in known]


def failure(error: Exception) -> dict[str, Any]:
    """The columns of a program that was not compiled."""
    columns = {"status": errors.kind(error), "message": str(error)[:2000]}
    if lacked := errors.shortage(str(error)):
        columns |= {"needed_bytes": lacked.needed_bytes, "available_bytes": lacked.available_bytes}
    return columns


def _resolve(point: Point, spec: model_spec.ModelSpec) -> tuple[dict[str, backends.Effective], dict[str, float]]:
    """Effective settings by kind of layer, and the seconds it took to build what schedules the host makes."""
    effective, start = {}, time.perf_counter()
    backend = backends.get(spec.attention.backend)
    for kind in dict.fromkeys(spec.layers):
        visibility = spec.attention.visibility(kind)
        heads = spec.attention.heads if point.what == "op" else spec.attention.heads_of_attend
        shape = (point.seq_len, heads, spec.attention.head_width, spec.dtype)
        how = {"packed": point.what == "step", "target": spec.attention.target}
        settings = backend.resolve(visibility, *shape, spec.attention.options(kind), **how)
        effective[kind] = {"backend": spec.attention.backend, **settings}
        if spec.attention.backend == "splash" and (build := schedules.TABLE[settings["schedule"]].host):
            build(*attend.kernel_of(visibility, point.seq_len, settings))
    return effective, {"schedule_seconds": time.perf_counter() - start}


Program = tuple[Callable, tuple, tuple[int, ...], roofline.Cost]  # with abstract arguments, and which are donated


def _op(point, config, spec, effective) -> dict[str, Program]:
    del config
    (kind,) = effective
    single = op_point(point.batch, point.seq_len, spec, kind)
    arguments, selected = jax.eval_shape(functools.partial(op.arguments, single))

    def forward(arguments, selected):
        return op.attend(single, arguments, selected, spec.attention.target)

    def forward_backward(arguments, selected, d_out):
        out, pull_back = jax.vjp(lambda arguments: forward(arguments, selected), arguments)
        return out, pull_back(d_out)

    costs = {phase: roofline.of_op(single, effective[kind], phase) for phase in PHASES["op"]}
    return {
        "forward": (forward, (arguments, selected), (), costs["forward"]),
        "forward_backward": (
            forward_backward,
            (arguments, selected, arguments["q"]),
            (),
            costs["forward_backward"],
        ),
    }


def _layer(point, config, spec, effective) -> dict[str, Program]:
    (kind,) = effective

    @hk.transform
    def layer(x, positions):
        return Attention(spec.attention, spec.rope, kind, spec.hidden, spec.norm_eps, spec.dtype)(x, positions)[0]

    x = jax.ShapeDtypeStruct((point.batch, point.seq_len, spec.hidden), spec.dtype)
    positions = jax.ShapeDtypeStruct((point.batch, point.seq_len), jnp.int32)
    params = jax.eval_shape(layer.init, jax.random.key(0), x, positions)

    def forward_backward(params, x, positions, d_out):
        out, pull_back = jax.vjp(lambda params, x: layer.apply(params, None, x, positions), params, x)
        return out, pull_back(d_out)

    cost = _attention_cost(point, spec, effective)
    learns = spec.attention.trains_indexer
    cost += roofline.of_matrices(params, point.batch * point.seq_len, indexer_learns=learns)
    return {"forward_backward": (forward_backward, (params, x, positions, x), (), cost)}


def _step(point, config, spec, effective) -> dict[str, Program]:
    optimizer = optimizer_lib.build(config)
    state = jax.eval_shape(lambda: step_lib.init(spec, optimizer, 0))
    tokens = jax.ShapeDtypeStruct((point.batch, point.seq_len), jnp.int32)
    batch = dict.fromkeys(("inputs", "targets", "positions", "segments"), tokens)
    update = step_lib.make_update(language_model.build(spec), optimizer, spec.attention)
    cost = _attention_cost(point, spec, effective)
    unused = () if spec.tied_head else ("embed",)
    learns = spec.attention.trains_indexer
    cost += roofline.of_matrices(state.params, point.batch * point.seq_len, indexer_learns=learns, unused=unused)
    return {"update": (update, (state, batch), (0,), cost)}


def op_point(batch: int, seq_len: int, spec: model_spec.ModelSpec, kind: str) -> op.Point:
    """The attention of a layer of that kind."""
    return op.Point(
        backend=spec.attention.backend,
        options=spec.attention.options(kind),
        visibility=spec.attention.visibility(kind),
        batch=batch,
        seq_len=seq_len,
        heads=spec.attention.heads,
        head_width=spec.attention.head_width,
        dtype=spec.dtype,
        repeats=0,
    )


def _attention_cost(point: Point, spec: model_spec.ModelSpec, effective) -> roofline.Cost:
    """Forward and backward of all layers' attentions, with their indexers."""
    cost = roofline.Cost(0, 0, 0)
    for kind in spec.layers * spec.repeats:
        single = op_point(point.batch, point.seq_len, spec, kind)
        cost += roofline.of_op(single, effective[kind], "forward_backward")
        if kind == "csa":
            index = (spec.attention.index_heads, spec.attention.index_head_width)
            entries = single.visibility.num_entries(point.seq_len)
            cost += roofline.of_index(point.batch, point.seq_len, entries, *index, learns=spec.attention.trains_indexer)
    return cost


def _compile(device, program, arguments, donated, *, free_layout: bool) -> dict[str, Any]:
    """Lowers and compiles for the device.

    With `free_layout` the compiler lays out arguments and results as it likes, as it does inside a model; else in rows.
    """
    placed = SingleDeviceSharding(device)
    if free_layout:
        placed = Format(Layout.AUTO, placed)
    start = time.perf_counter()
    jitted = jax.jit(program, in_shardings=placed, out_shardings=placed, donate_argnums=donated)
    lowered = jitted.trace(*arguments).lower(lowering_platforms=("tpu",))
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    memory = compiled.memory_analysis()
    return {
        "lower_seconds": middle - start,
        "compile_seconds": end - middle,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
        "status": "ok",
    }


if __name__ == "__main__":
    for found in rows(Point(**json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")))):
        print(json.dumps(found), flush=True)
