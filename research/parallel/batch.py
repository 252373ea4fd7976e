"""Data parallelism: every device holds the whole state and some rows of the batch."""

from collections.abc import Callable
from typing import Any

import jax
import ml_collections
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from research.config import ConfigError

AXIS = "batch"


def join(config: ml_collections.ConfigDict) -> None:
    """Joins the processes that `config.distributed` describes; to be called before anything else asks for devices.

    Raises:
      ConfigError: the processes would not know that they share a folder, or do not find each other.
    """
    if not config.distributed.coordinator:
        return
    if not config.run.id:
        raise ConfigError("config.run.id='': must be given with distributed.coordinator, the same for all processes")
    try:
        if config.distributed.coordinator == "auto":
            jax.distributed.initialize()
        else:
            processes, process = config.distributed.num_processes, config.distributed.process_id
            jax.distributed.initialize(config.distributed.coordinator, processes, process)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"config.distributed.coordinator={config.distributed.coordinator!r}: {error}") from error


def mesh(batch_size: int) -> Mesh:
    """All devices of all processes in one row.

    Raises:
      ConfigError: they cannot share the batch evenly.
    """
    devices = jax.device_count()
    if batch_size % devices:
        raise ConfigError(f"config.data.batch_size={batch_size}: must be a multiple of the {devices} devices")
    return jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def distribute(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Gives each device its rows of a batch [B, ...].

    Every process packs the whole batch, little work beside a step, and keeps its own rows: so the batches, and the
    iterator's state in a checkpoint, depend neither on the number of processes nor on that of devices.
    """
    rows = NamedSharding(mesh, PartitionSpec(AXIS))
    return {name: jax.make_array_from_callback(array.shape, rows, array.__getitem__) for name, array in batch.items()}


def mean(
    of_rows: Callable[[Any, Any], tuple[Any, jax.Array, Any]], mesh: Mesh
) -> Callable[[Any, Any], tuple[Any, jax.Array, Any]]:
    """Turns a mean over the tokens of some rows into the mean over those of the whole batch.

    Each device computes its own rows as if they were all, so any kernel will do, also one that XLA cannot partition.

    Args:
      of_rows: `(params, batch) -> (means, tokens, sums)`; means and sums are trees of arrays, tokens the number that
        the means are over, int32 [].
      mesh: `mesh`.

    Returns:
      A function of the same signature over batches that `distribute` made.
    """

    def local(params, batch):
        means, tokens, sums = of_rows(params, batch)
        total = jax.lax.psum(tokens, AXIS)
        share = tokens / jax.numpy.maximum(total, 1)
        means = jax.tree.map(lambda x: jax.lax.psum(x * share.astype(x.dtype), AXIS), means)
        return means, total, jax.lax.psum(sums, AXIS)

    whole, rows = PartitionSpec(), PartitionSpec(AXIS)
    return jax.shard_map(local, mesh=mesh, in_specs=(whole, rows), out_specs=whole, check_vma=False)
