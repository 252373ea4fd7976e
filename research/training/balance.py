"""How even the loads of experts are, and what keeps them so: a number per expert, moved by its load.

Source: balancing without an auxiliary loss, DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
"""

import haiku as hk
import jax
import jax.numpy as jnp

from research.model.router import BALANCE

Loads = dict[str, jax.Array]  # float32 [X] or [repeats, X], tokens of each expert, by the layer's name


def move(params: hk.Params, loads: Loads, rate: float) -> hk.Params:
    """Moves each balance up by `rate` where the expert had fewer tokens than the mean, down where it had more.

    Args:
      params: of the model.
      loads: of the whole batch, all devices' and micro-batches'.
      rate: how far.
    """

    def moved(module: str, name: str, value: jax.Array) -> jax.Array:
        if name != BALANCE:
            return value
        load = loads[_layer(module, loads)]
        return value + rate * jnp.sign(load.mean(axis=-1, keepdims=True) - load)

    return hk.data_structures.map(moved, params)


def metrics(params: hk.Params, loads: Loads) -> dict[str, jax.Array]:
    """What tells of trouble early, float32 []; nothing without experts.

    Returns:
      expert_load: the largest load of an expert, by the mean of its layer; of the layer where that is most.
      dead_experts: how many have no token, of all layers.
      balance_range: from the least to the greatest balance, of the layer where that is most; where there is one.
    """
    if not loads:
        return {}
    largest = [(load / jnp.maximum(load.mean(axis=-1, keepdims=True), 1e-20)).max() for load in loads.values()]
    found = {
        "expert_load": jnp.stack(largest).max(),
        "dead_experts": jnp.stack([(load == 0).sum() for load in loads.values()]).sum().astype(jnp.float32),
    }
    balances = [value for _, name, value in hk.data_structures.traverse(params) if name == BALANCE]
    if balances:
        found["balance_range"] = jnp.stack([jnp.ptp(value, axis=-1).max() for value in balances]).max()
    return found


def _layer(module: str, loads: Loads) -> str:
    """The layer that a module belongs to."""
    (name,) = loads.keys() & {*module.split("/")}
    return name
