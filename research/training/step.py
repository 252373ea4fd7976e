"""One update of the parameters, compiled explicitly so that what the compiler says of it can be recorded."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from research.attention.attend import Documents
from research.attention.spec import Spec
from research.attention.visibility import KINDS
from research.metrics import Mean
from research.model import language_model
from research.parallel import batch as parallel
from research.settings.attention import Kernel
from research.training import accuracy, balance, loss
from research.training import optimizer as optimizer_lib

Metrics = dict[str, jax.Array]

LOADS = "loads/"


class State(NamedTuple):
    """What an update changes."""

    params: hk.Params
    opt_state: optax.OptState


def init(
    spec: Spec, optimizer: optax.GradientTransformation, seed: int, sharding: jax.sharding.Sharding | None = None
) -> State:
    """The state before the first update, laid out as `sharding` says; `seed` is from 0 to 2**32 - 1.

    Parameters depend neither on the backend nor on the length, so they are made by the dense one, on the shortest
    sequence that has a compressed entry of every kind: Haiku runs the whole model for it.
    """
    attention = {"backend": "dot_product", **dataclasses.asdict(Kernel())}
    model = language_model.build(dataclasses.replace(spec, settings=spec.settings.replace(attention=attention)))
    shortest = max(spec.visibility(kind).stride for kind in KINDS)

    def create(key: jax.Array) -> State:
        params = model.init(key, jnp.zeros((1, shortest), jnp.int32), Documents.whole(1, shortest))
        return State(params, optimizer.init(params))

    # Named, for JAX's defaults are the environment's to change, and with them the numbers of a seed.
    with jax.threefry_partitionable(True):
        return jax.jit(create, out_shardings=sharding)(jax.random.key(seed, impl="threefry2x32"))


def documents(batch: dict) -> Documents:
    """The documents of a batch, whose arrays may be NumPy's."""
    return Documents(jnp.asarray(batch["positions"]), jnp.asarray(batch["segments"]))


def losses(model: hk.Transformed, params: hk.Params, batch: dict) -> dict[str, Mean]:
    """Sums over the batch, each with what it is to be divided by.

    Returns:
      loss: the language model's, over the tokens that have a target; see `loss.cross_entropy`.
      The means of `language_model.Output`; and, with `LOADS` before the layer's name, the loads of experts as float32.
    """
    output = _apply(model, params, batch)
    tokens = (jnp.asarray(batch["segments"]) >= 0).sum()
    loads = {f"{LOADS}{name}": Mean(load.astype(jnp.float32), tokens) for name, load in output.loads.items()}
    return _losses(output, batch) | loads


def measures(model: hk.Transformed, params: hk.Params, batch: dict) -> dict[str, Mean]:
    """What validation asks for: as `losses` without loads, and a recall task's accuracy."""
    output = _apply(model, params, batch)
    means = _losses(output, batch)
    if "distances" in batch:
        means |= accuracy.by_distance(output.logits, batch["targets"], batch["distances"])
    return means


def _apply(model: hk.Transformed, params: hk.Params, batch: dict) -> language_model.Output:
    return model.apply(params, None, jnp.asarray(batch["inputs"]), documents(batch))


def _losses(output: language_model.Output, batch: dict) -> dict[str, Mean]:
    return {"loss": loss.cross_entropy(output.logits, batch["targets"], batch["segments"])} | output.means


def make_update(
    spec: Spec,
    model: hk.Transformed,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[..., tuple[State, Metrics]]:
    """Returns `(state, batch, going=True) -> (state, metrics)`.

    Minimised is the language model's loss and, at their weights, the mean of the indexers' losses over the CSA layers
    and tokens, and that of the experts' balance over layers and documents. After the optimizer, each expert's balance
    is moved by its load, see `balance.move`. Metrics are scalars: loss (the language model's), tokens, the means of the
    model, those of `balance.metrics`, and grad_norm, before clipping, of all that learns. Where one of them is not
    finite, the state returned is the one given: what led there can be looked at. So it is where `going`, bool [], is
    false: it is the metric `going` of the update before, which says whether that and all before it were finite. So
    updates can be started before the host has seen the numbers of earlier ones. With a mesh, the devices share the rows
    of the batch; see `parallel.gradients`.
    """
    trains = optimizer_lib.trains(spec)
    attention, experts = spec.settings.attention, spec.settings.experts
    weights = {"loss": 1.0, "indexer_kl": attention.indexer_loss_weight, "balance": experts.balance_weight}
    rate = experts.balance_rate if spec.trains_model else 0.0

    def terms(trained: hk.Params, fixed: hk.Params, batch: dict) -> dict[str, Mean]:
        return losses(model, hk.data_structures.merge(trained, fixed), batch)

    gradients = parallel.gradients(terms, weights, mesh, spec.settings.train.accumulate)

    def apply(state: State, grads: hk.Params, loads: balance.Loads) -> State:
        changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(balance.move(optax.apply_updates(state.params, changes), loads, rate), opt_state)

    def update(state: State, batch: dict, going: jax.Array | bool = True) -> tuple[State, Metrics]:
        trained, fixed = hk.data_structures.partition(
            lambda module, name, _: trains[optimizer_lib.group(module, name)], state.params
        )
        grads, means = gradients(trained, fixed, batch)
        loads = {name.removeprefix(LOADS): means.pop(name).total for name in [*means] if name.startswith(LOADS)}
        grads = hk.data_structures.merge(grads, jax.tree.map(jnp.zeros_like, fixed))
        metrics = {name: mean.mean() for name, mean in means.items()}
        metrics |= {"tokens": means["loss"].count, "grad_norm": optax.tree.norm(grads)}
        metrics |= balance.metrics(state.params, loads)
        going &= jnp.stack([jnp.isfinite(value) for value in metrics.values()]).all()
        # A branch, not a selection, which would need the memory of both states.
        state = jax.lax.cond(going, apply, lambda state, *_: state, state, grads, loads)
        return state, metrics | {"going": going}

    return update


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program and its price.

    Attributes:
      program: the function that was compiled.
      cost: lower_seconds (tracing, with the construction of static masks), compile_seconds, and from the compiler
        temp_bytes, argument_bytes, output_bytes, and alias_bytes, those of outputs that take an argument's place.
    """

    program: Callable
    cost: dict[str, Any]


def compile_program(function: Callable, *arguments: Any, donated: int | tuple[int, ...] = ()) -> Compiled:
    """Lowers and compiles for these arguments or their shapes, of which some are `donated`; runs nothing."""
    start = time.perf_counter()
    lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    memory = compiled.memory_analysis()
    return Compiled(
        compiled,
        {
            "lower_seconds": middle - start,
            "compile_seconds": end - middle,
            "temp_bytes": memory.temp_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "alias_bytes": memory.alias_size_in_bytes,
        },
    )
