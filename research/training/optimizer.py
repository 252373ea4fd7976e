"""AdamW with warm-up, cosine decay and clipping by global norm, apart for the indexers and for the rest of the model.

Apart, since the indexers have a loss of their own, which is to leave the model alone: a common norm to clip would not.
"""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from research.attention.spec import Spec
from research.model.router import UNTRAINED
from research.settings.config import Settings


def learning_rate(settings: Settings) -> optax.Schedule:
    """The learning rate of each update, counted from 0.

    Update i of the warm-up takes the share (i + 1) / (warmup_steps + 1), so that none is lost to a rate of 0; a cosine
    leads from the full rate at update `warmup_steps` to `final_fraction` of it at `train.steps`.
    """
    peak, warmup = settings.optimizer.learning_rate, settings.optimizer.warmup_steps
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=settings.train.steps,
        end_value=peak * settings.optimizer.final_fraction,
    )


def build(spec: Spec) -> optax.GradientTransformation:
    """The optimizer that `settings.optimizer` describes, over `settings.train.steps` updates.

    Parameters that the stage of CSA does not train stay as they are, and so does what is remembered of them. The
    state's tree is the same in every stage.
    """
    settings = spec.settings.optimizer
    adamw = optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            learning_rate(spec.settings),
            b1=settings.b1,
            b2=settings.b2,
            weight_decay=settings.weight_decay,
            mask=decayed,
        ),
    )
    groups = {name: adamw if learns else _kept(adamw) for name, learns in trains(spec).items()}
    if "fixed" in groups:
        groups["fixed"] = optax.set_to_zero()  # and no moments, which a table of integers cannot have
    return optax.partition(
        groups, lambda params: hk.data_structures.map(lambda module, name, _: group(module, name), params)
    )


def group(module: str, name: str) -> str:
    """The group of a parameter of a Haiku module: 'indexer', 'fixed', which no gradient trains, or 'model'."""
    if name in UNTRAINED:
        return "fixed"
    return "indexer" if "indexer" in module.split("/") else "model"


def trains(spec: Spec) -> dict[str, bool]:
    """Which groups learn by gradients, of those that the model has."""
    learn = {"model": spec.trains_model, "indexer": spec.trains_indexer}
    return learn | ({"fixed": False} if spec.settings.experts.count else {})


def restarted(opt_state: optax.OptState) -> optax.OptState:
    """The same state, moments and all, at the beginning of the learning rate's schedule."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def restart(node: Any) -> Any:
        return node._replace(count=jnp.zeros_like(node.count)) if is_schedule(node) else node

    return jax.tree.map(restart, opt_state, is_leaf=is_schedule)


def _kept(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Changes nothing, and keeps a state like that of `inner`."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return jax.tree.map(jnp.zeros_like, updates), state

    return optax.GradientTransformation(inner.init, update)


def decayed(params: hk.Params) -> dict[str, dict[str, bool]]:
    """Which parameters weight decay pulls at: matrices, not scales, sinks or biases.

    Told by name: the axis along which layers are stacked makes a vector look like a matrix.
    """
    return hk.data_structures.map(lambda module, name, value: name not in _NOT_DECAYED, params)


_NOT_DECAYED = ("scale", "sinks", "position_bias", "bias", *UNTRAINED)
