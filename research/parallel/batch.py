"""Data parallelism: every device holds the whole state and some rows of the batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from research.errors import ConfigError, SettingError
from research.metrics import Mean
from research.settings.config import Settings

AXIS = "batch"
Counts = dict[str, jax.Array]  # int32 [] by the name of a term


def join(settings: Settings) -> None:
    """Joins the processes that `settings.distributed` describes; to be called before anything else asks for devices.

    Raises:
      ConfigError: the processes would not know that they share a folder, or do not find each other.
    """
    if not settings.distributed.coordinator:
        return
    if not settings.run.id:
        raise SettingError("run.id", "", "given with distributed.coordinator, the same for all processes")
    try:
        if settings.distributed.coordinator == "auto":
            jax.distributed.initialize()
        else:
            processes, process = settings.distributed.num_processes, settings.distributed.process_id
            jax.distributed.initialize(settings.distributed.coordinator, processes, process)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"config.distributed.coordinator={settings.distributed.coordinator!r}: {error}") from error


def mesh(settings: Settings) -> Mesh:
    """All devices of all processes in one row.

    Raises:
      ConfigError: they cannot share each micro-batch evenly.
    """
    devices, parts = jax.device_count(), settings.train.accumulate
    if settings.data.batch_size % (devices * parts):
        words = f"a multiple of the {devices} devices" + (f" times train.accumulate={parts}" if parts > 1 else "")
        raise settings.data.error("batch_size", words)
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


def gradients(
    terms: Callable[[Any, Any, Any], dict[str, Mean]],
    weights: dict[str, float],
    mesh: Mesh | None = None,
    parts: int = 1,
) -> Callable[[Any, Any, Any], tuple[Any, dict[str, Mean]]]:
    """Turns the terms of a loss over some rows into the gradient of the loss over the whole batch.

    The loss is the sum of `weight * total / count`, a term's total and count being those of all devices and
    micro-batches. So each term is divided by what it counts itself, before the gradient is taken: tokens that have a
    target are not those that an indexer learns from, and a mean that a device or a micro-batch took of its own rows,
    weighted afterwards, would give one term the other's share. Each device computes its own rows as if they were all,
    so any kernel will do, also one that XLA cannot partition.

    Args:
      terms: `(trained, fixed, batch) -> {name: Mean}`, sums over the batch's rows; counts depend on the batch alone.
      weights: of the terms that are minimised, by name, as far as there are such; the others are summed up only.
      mesh: `mesh`, for batches that `distribute` made; None where there is one device.
      parts: micro-batches that each device computes its rows in, one after the other; only one is in memory.

    Returns:
      `(trained, fixed, batch) -> (gradient, terms)`: the loss's gradient by `trained`, and the whole batch's terms.
      Totals of terms that are not minimised may be float32 arrays of any shape.
    """
    summed = _summed if mesh is not None else lambda tree: tree

    def part_gradients(trained: Any, fixed: Any, part: Any, counts: Counts | None) -> tuple[Any, tuple[dict, Counts]]:
        """The gradient of the part's share, and its totals; counts, if not given, are those of this part."""

        def loss(trained: Any) -> tuple[jax.Array, tuple[dict, Counts]]:
            own = terms(trained, fixed, part)
            all_counts = summed({name: mean.count for name, mean in own.items()}) if counts is None else counts
            shares = [
                weight * Mean(own[name].total, all_counts[name]).mean()
                for name, weight in weights.items()
                if name in own
            ]
            # Not summed over the devices here: differentiated within shard_map, a sum's gradient is theirs times over.
            return sum(shares), ({name: mean.total for name, mean in own.items()}, all_counts)

        return jax.grad(loss, has_aux=True)(trained)

    def row_gradients(trained: Any, fixed: Any, batch: dict[str, jax.Array]) -> tuple[Any, dict[str, Mean]]:
        if parts == 1:
            gradient, (totals, counts) = part_gradients(trained, fixed, batch, None)
        else:
            split = jax.tree.map(lambda rows: rows.reshape(parts, rows.shape[0] // parts, *rows.shape[1:]), batch)

            def count(part: Any) -> Counts:  # of which the compiler leaves nothing but the counts
                return {name: mean.count for name, mean in terms(trained, fixed, part).items()}

            def add(sums: Any, part: Any) -> tuple[Any, None]:
                gradient, (totals, _) = part_gradients(trained, fixed, part, counts)
                return jax.tree.map(jnp.add, sums, (gradient, totals)), None

            counts = summed({name: each.sum() for name, each in jax.lax.map(count, split).items()})
            shapes = jax.eval_shape(terms, trained, fixed, jax.tree.map(lambda rows: rows[0], split))
            totals = {name: jnp.zeros_like(mean.total) for name, mean in shapes.items()}
            zeros = jax.tree.map(jnp.zeros_like, trained), totals
            (gradient, totals), _ = jax.lax.scan(add, zeros, split)
        totals = summed(totals)
        return summed(gradient), {name: Mean(totals[name], counts[name]) for name in totals}

    if mesh is None:
        return row_gradients
    whole, rows = PartitionSpec(), PartitionSpec(AXIS)
    return jax.shard_map(row_gradients, mesh=mesh, in_specs=(whole, whole, rows), out_specs=whole, check_vma=False)


def totals(row_gradients: Callable[[Any, Any], Any], mesh: Mesh) -> Callable[[Any, Any], Any]:
    """Turns `(params, batch) -> sums`, a tree over some rows, into that over the rows of all devices."""

    def local(params: Any, batch: dict[str, jax.Array]) -> Any:
        return _summed(row_gradients(params, batch))

    whole, rows = PartitionSpec(), PartitionSpec(AXIS)
    return jax.shard_map(local, mesh=mesh, in_specs=(whole, rows), out_specs=whole, check_vma=False)


def _summed(tree: Any) -> Any:
    return jax.lax.psum(tree, AXIS)
