"""Checkpoints: the state, and where the data iterator stands, under the number of updates done.

Nothing else is random in a run: parameters and data orders come from the config's seed. orbax writes a checkpoint while
training goes on, under a temporary name until it is whole. It does not notice bytes that change afterwards, so each
checkpoint carries a fingerprint of every array, and one that does not match is passed over for the one before it.
"""

import json
import pathlib
import warnings
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from research import errors
from research.config import ConfigError
from research.training.step import State

FOLDER = "checkpoints"  # of a run's own


def newest(folder: pathlib.Path, like: State) -> State | None:
    """The state at the newest whole checkpoint of another run, None where there is none; else as `restore`."""
    if not (folder / FOLDER).is_dir():  # `Checkpoints` would make it
        return None
    with Checkpoints(folder / FOLDER) as saved:
        restored = saved.restore(like)
    return restored and restored.state


class Restored(NamedTuple):
    """What a checkpoint holds: updates done, the state after them, and the data iterator's `get_state()`."""

    step: int
    state: State
    iterator: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run; a context manager, so that a failing run still waits for the last one."""

    def __init__(self, folder: pathlib.Path, keep_last: int = 1, keep_best: int = 0):
        """Keeps the `keep_last` newest, and the `keep_best` of the lowest validation loss among those that have one."""
        best = preservation_policy.BestN(
            get_metric_fn=lambda metrics: metrics["val_loss"],
            reverse=True,
            n=keep_best,
            keep_checkpoints_without_metrics=False,
        )
        kept = preservation_policy.AnyPreservationPolicy([preservation_policy.LatestN(keep_last), best])
        options = ocp.CheckpointManagerOptions(preservation_policy=kept, cleanup_tmp_directories=True)
        self._folder = folder.absolute()
        with errors.of_disk(self._folder):
            self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        with errors.of_disk(self._folder):
            self._manager.close()

    def save(self, step: int, state: State, iterator: dict[str, Any], val_loss: float | None = None) -> None:
        """Starts to write a checkpoint, once the one before is on the disk; the state may be donated afterwards.

        Raises:
          OSError: this or the previous checkpoint cannot be written.
        """
        record = {"iterator": iterator, "arrays": _describe(state)}
        record["crc32"] = _crc32(record)
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
        metrics = None if val_loss is None else {"val_loss": val_loss}
        with errors.of_disk(self._folder):
            self._manager.save(step, args=items, metrics=metrics)

    def wait(self) -> None:
        """Returns when all is on the disk; raises as `save` does."""
        with errors.of_disk(self._folder):
            self._manager.wait_until_finished()

    def restore(self, like: State) -> Restored | None:
        """Reads the newest checkpoint that is whole; None where there is none.

        Damaged ones are put aside as `STEP.damaged`, with a warning.

        Args:
          like: the tree, shapes, dtypes and shardings that are wanted.

        Raises:
          ConfigError: a checkpoint is whole, but its arrays are not those of `like`; names them.
          OSError: a checkpoint may not be read, or not just now.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                with errors.of_disk(self._folder):
                    return self._read(step, like)
            except Exception as error:  # orbax has no class of its own for what damage does to a file
                if errors.kind(error) != errors.OTHER:  # the fault of something else than the checkpoint
                    raise
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                aside = self._put_aside(step)
                if jax.process_index() == 0:
                    warnings.warn(f"checkpoint {step} is damaged ({reason}); kept as {aside}", stacklevel=2)
        return None

    def _read(self, step: int, like: State) -> Restored:
        record = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record
        if record.pop("crc32") != _crc32(record):
            raise _DamageError("its record does not match its checksum")
        _check_fit(step, record["arrays"], like)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        state = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))).state
        found = _describe(state)
        if damaged := [name for name, array in record["arrays"].items() if array != found[name]]:
            raise _DamageError(f"{', '.join(damaged)} do not match their fingerprints")
        return Restored(step, state, record["iterator"])

    def _put_aside(self, step: int) -> str:
        taken = len(list(self._folder.glob(f"{step}.damaged*")))
        aside = self._folder / f"{step}.damaged{taken or ''}"
        if jax.process_index() == 0:
            (self._folder / str(step)).rename(aside)
        ocp.multihost.sync_global_processes("put a damaged checkpoint aside")
        self._manager.reload()
        return aside.name


class _DamageError(Exception):
    """A checkpoint can be read, but is not what was saved."""


@jax.jit
def fingerprints(tree: Any) -> Any:
    """A uint32 for every array of a tree, which any single changed bit changes.

    The sum of the array's words, each times an odd number made from its place: integers, so the same whatever the
    order of the sum, on any number of devices.
    """

    def fingerprint(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
        words = jax.lax.bitcast_convert_type(x, f"uint{8 * min(x.dtype.itemsize, 4)}").astype(jnp.uint32)
        place = jnp.zeros(words.shape, jnp.uint32)
        for axis, size in enumerate(words.shape):
            place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        return jnp.sum(words * (place * jnp.uint32(0x9E3779B2) + 1), dtype=jnp.uint32)

    return jax.tree.map(fingerprint, tree)


def _describe(state: State) -> dict[str, list]:
    """Dtype, shape and fingerprint of each array by its path, fit for JSON."""
    marks = jax.device_get(fingerprints(state))
    return _by_path(lambda x, mark: [str(x.dtype), list(x.shape), int(mark)], state, marks)


def _check_fit(step: int, there: dict[str, list], like: State) -> None:
    def names(arrays):
        return {name: f"{dtype}{shape}" for name, (dtype, shape, *_) in arrays.items()}

    there, here = names(there), names(_by_path(lambda x: [str(x.dtype), list(x.shape)], like))
    changed = [
        f"{name}: {there.get(name, 'nothing')} there, {here.get(name, 'nothing')} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    if changed:
        raise ConfigError(f"checkpoint {step} does not fit the model ({'; '.join(changed)})")


def _by_path(describe: Callable, *trees: Any) -> dict[str, list]:
    leaves = [jax.tree.leaves(tree) for tree in trees]
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(trees[0])]
    return {path: describe(*arrays) for path, *arrays in zip(paths, *leaves, strict=True)}


def _crc32(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
