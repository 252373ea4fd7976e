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
from research.training import accuracy, loss
from research.training import optimizer as optimizer_lib

Metrics = dict[str, jax.Array]


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
      indexer_...: what the model says of its indexers, over the layers and tokens that they have a part in; see
        `research.attention.indexer.loss`.
    """
    logits, indexer_means = model.apply(params, None, jnp.asarray(batch["inputs"]), documents(batch))
    return _losses(logits, indexer_means, batch)


def measures(model: hk.Transformed, params: hk.Params, batch: dict) -> dict[str, Mean]:
    """What validation asks for: as `losses`, and a recall task's accuracy."""
    logits, indexer_means = model.apply(params, None, jnp.asarray(batch["inputs"]), documents(batch))
    means = _losses(logits, indexer_means, batch)
    if "distances" in batch:
        means |= accuracy.by_distance(logits, batch["targets"], batch["distances"])
    return means


def _losses(logits: jax.Array, indexer_means: dict[str, Mean], batch: dict) -> dict[str, Mean]:
    language = {"loss": loss.cross_entropy(logits, batch["targets"], batch["segments"])}
    return language | {f"indexer_{name}": mean for name, mean in indexer_means.items()}


def make_update(
    spec: Spec,
    model: hk.Transformed,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[..., tuple[State, Metrics]]:
    """Returns `(state, batch, going=True) -> (state, metrics)`.

    Minimised is the language model's loss and, at its weight, the mean of the indexers' losses over the CSA layers and
    tokens. Metrics are scalars: loss (the language model's), tokens, indexer_kl where indexers learn, and grad_norm,
    before clipping, of all that learns. Where one of them is not finite, the state returned is the one given: what led
    there can be looked at. So it is where `going`, bool [], is false: it is the metric `going` of the update before,
    which says whether that and all before it were finite. So updates can be started before the host has seen the
    numbers of earlier ones. With a mesh, the devices share the rows of the batch; see `parallel.gradients`.
    """
    trains = optimizer_lib.trains(spec)
    weights = {"loss": 1.0, "indexer_kl": spec.settings.attention.indexer_loss_weight}

    def terms(trained: hk.Params, fixed: hk.Params, batch: dict) -> dict[str, Mean]:
        return losses(model, hk.data_structures.merge(trained, fixed), batch)

    gradients = parallel.gradients(terms, weights, mesh, spec.settings.train.accumulate)

    def apply(state: State, grads: hk.Params) -> State:
        changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, changes), opt_state)

    def update(state: State, batch: dict, going: jax.Array | bool = True) -> tuple[State, Metrics]:
        trained, fixed = hk.data_structures.partition(
            lambda module, *_: trains[optimizer_lib.group(module)], state.params
        )
        grads, means = gradients(trained, fixed, batch)
        grads = hk.data_structures.merge(grads, jax.tree.map(jnp.zeros_like, fixed))
        metrics = {name: mean.mean() for name, mean in means.items()}
        metrics |= {"tokens": means["loss"].count, "grad_norm": optax.tree.norm(grads)}
        going &= jnp.stack([jnp.isfinite(value) for value in metrics.values()]).all()
        # A branch, not a selection, which would need the memory of both states.
        return jax.lax.cond(going, apply, lambda state, _: state, state, grads), metrics | {"going": going}

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
