"""Checkpoints: the state, and where the data iterator stands, under the number of updates done.

Nothing else is random in a run: parameters and data orders come from the config's seed. orbax writes a checkpoint while
training goes on, under a temporary name until it is whole. It does not notice bytes that change afterwards, so each
checkpoint carries a fingerprint of every array.

A checkpoint is damaged only where something of it is missing or does not match, and that is named; any other failure to
read it, of the disk, the network or the memory, is raised as what it is. Reading changes nothing on the disk.

One file: what is written and what reading holds it to are one format, which nobody else knows.
"""

import hashlib
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from research import errors
from research.errors import ConfigError, DamagedError
from research.parallel.agreement import exchange, together

FOLDER = "checkpoints"  # of a run's own

_ASIDE = ".damaged"
_NEEDED = ("record/metadata", "state/_METADATA", "state/manifest.ocdbt")  # files that each checkpoint has
# How tensorstore says that a file lacks bytes, or holds others than were written.
_LOST = re.compile(r"\b(NOT_FOUND|DATA_LOSS|OUT_OF_RANGE|INVALID_ARGUMENT|FAILED_PRECONDITION): ")


class Restored(NamedTuple):
    """What a checkpoint holds: updates done, the state after them, the data iterator's `get_state()`, and a digest.

    `row` is what `metrics.jsonl` is to say of the last update, empty where nothing; it is logged after the checkpoint.
    `totals` are sums over all updates, empty in checkpoints of versions that had none.
    """

    step: int
    state: Any
    iterator: dict[str, Any]
    row: dict[str, Any]
    totals: dict[str, float]
    digest: str


def steps(folder: pathlib.Path) -> list[int]:
    """The steps of the checkpoints in a folder, newest first; half-written ones do not count."""
    if not folder.is_dir():
        return []
    return sorted((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), reverse=True)


def read(folder: pathlib.Path, step: int, like: Any) -> Restored:
    """Reads one checkpoint; every process all of it by itself, so that none waits for one that fails.

    Args:
      folder: of checkpoints.
      step: one of `steps`.
      like: the tree, shapes, dtypes and shardings that are wanted.

    Raises:
      DamagedError: something of it is missing, or does not match; names it.
      ConfigError: it is whole, but its arrays are not those of `like`; names them.
      OSError, MemoryError: it cannot be read just now.
    """
    path = folder.absolute() / str(step)
    records = ocp.JsonCheckpointHandler(multiprocessing_options=_alone())
    record = _item(path, lambda: records.restore(path / "record"))
    if not isinstance(record, dict) or record.pop("crc32", None) != _crc32(record):
        raise DamagedError("its record does not match its checksum")
    _check_fit(step, record["arrays"], like)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    states = ocp.StandardCheckpointHandler(multiprocessing_options=_alone())
    state = _item(path, lambda: states.restore(path / "state", args=ocp.args.StandardRestore(abstract)))
    found = _describe(state)
    if damaged := [name for name, array in record["arrays"].items() if array != found[name]]:
        raise DamagedError(f"{', '.join(damaged)} do not match their fingerprints")
    digest = hashlib.sha256(json.dumps(record["arrays"], sort_keys=True).encode()).hexdigest()
    return Restored(step, state, record["iterator"], record.get("row", {}), record.get("totals", {}), digest)


def newest(folder: pathlib.Path, like: Any, warn: Callable[[str], None]) -> Restored | None:
    """Reads the newest checkpoint that is whole, and puts the damaged ones before it aside as `STEP.damaged`.

    To be called by the folder's owner alone, and by all its processes, which agree before anything is put aside.

    Args:
      folder: of checkpoints.
      like: as `read`.
      warn: is told in a line what was damaged.

    Returns:
      None where there was never one.

    Raises:
      DamagedError: there are checkpoints, and none is whole; all are left as they are.
      What else `read` raises; then nothing was changed either.
    """
    damage: dict[int, str] = {}
    for step in steps(folder):
        restored, reason = together(lambda step=step: _try(folder, step, like))
        if reasons := sorted({said for said in exchange(reason) if said}):
            damage[step] = "; ".join(reasons)
            continue
        kept = together(lambda: {damaged: _put_aside(folder, damaged) for damaged in damage})
        for damaged, aside in kept.items():
            warn(f"checkpoint {damaged} is damaged ({damage[damaged]}); kept as {aside}")
        return restored
    aside = sorted(path.name for path in folder.glob(f"*{_ASIDE}*")) if folder.is_dir() else []
    if damage or aside:
        told = [f"{step}: {reason}" for step, reason in damage.items()]
        told += [f"{name}: put aside before" for name in aside]
        raise DamagedError(
            f"{folder}: none of the checkpoints is whole ({'; '.join(told)}); nothing was changed. Put back a copy of "
            "one, or move the folder away to start the run from its first step"
        )
    return None


class Writer:
    """Writes a run's checkpoints; a context manager, so that a failing run still waits for the last one.

    For the folder's owner alone: what an earlier, killed process left half-written is removed.
    """

    def __init__(self, folder: pathlib.Path, keep_last: int = 1, keep_best: int = 0) -> None:
        """Keeps the `keep_last` newest, and the `keep_best` of the lowest validation loss, as `validated` says."""
        self._val_losses: dict[int, float] = {}
        self._kept = _Kept(keep_last, keep_best, self._val_losses)
        options = ocp.CheckpointManagerOptions(preservation_policy=self._kept, cleanup_tmp_directories=True)
        self._folder = folder.absolute()
        with errors.disk_errors(self._folder):
            self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        with errors.disk_errors(self._folder):
            self._manager.close()

    def validated(self, val_losses: dict[int, float]) -> None:
        """Says what the validation of some steps was; a step is saved before it is validated."""
        self._val_losses.update(val_losses)

    def save(
        self,
        step: int,
        state: Any,
        iterator: dict[str, Any],
        row: dict[str, Any] | None = None,
        totals: dict[str, float] | None = None,
    ) -> None:
        """Starts to write a checkpoint, once the one before is on the disk; the state may be donated afterwards.

        Args:
          step: updates done.
          state: a tree of arrays.
          iterator: the data iterator's `get_state()`.
          row: what is still to be logged of this step.
          totals: sums over all updates so far.

        Raises:
          OSError: this or the previous checkpoint cannot be written.
        """
        record = {"iterator": iterator, "arrays": _describe(state), "row": row or {}, "totals": totals or {}}
        record["crc32"] = _crc32(record)
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
        with errors.disk_errors(self._folder):
            self._manager.save(step, args=items)

    def wait(self) -> None:
        """Returns when all is on the disk, and no more than is to be kept; raises as `save` does."""
        with errors.disk_errors(self._folder):
            self._manager.wait_until_finished()
            present = sorted(self._manager.all_steps())
            for step, kept in zip(present, self._kept.which(present), strict=True):
                if not kept:
                    self._manager.delete(step)


class _Kept(preservation_policy.PreservationPolicy):
    """The newest, and the best of those whose validation loss is known."""

    def __init__(self, last: int, best: int, val_losses: dict[int, float]) -> None:
        self._last, self._best, self._val_losses = last, best, val_losses

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """See orbax's `PreservationPolicy`."""
        del context
        return self.which([checkpoint.step for checkpoint in checkpoints])

    def which(self, steps: Iterable[int]) -> list[bool]:
        """Of steps in rising order, which are kept."""
        steps = list(steps)
        known = sorted((self._val_losses[step], step) for step in steps if step in self._val_losses)
        kept = {*steps[-self._last :], *(step for _, step in known[: self._best])}
        return [step in kept for step in steps]


def _try(folder: pathlib.Path, step: int, like: Any) -> tuple[Restored | None, str]:
    """What is read, or why it is damaged."""
    try:
        return read(folder, step, like), ""
    except DamagedError as error:
        return None, str(error)


def _put_aside(folder: pathlib.Path, step: int) -> str:
    taken = len(list(folder.glob(f"{step}{_ASIDE}*")))
    aside = folder / f"{step}{_ASIDE}{taken or ''}"
    if jax.process_index() == 0:
        (folder / str(step)).rename(aside)
    return aside.name


def _item(path: pathlib.Path, action: Callable[[], Any]) -> Any:
    """What `action` reads of the checkpoint at `path`; raises as `read` does."""
    try:
        with errors.disk_errors(path):
            return action()
    except Exception as error:
        tells = isinstance(error, FileNotFoundError) or not isinstance(error, OSError)
        if tells and (reason := _evidence(path, error)):
            raise DamagedError(reason) from error
        raise


def _evidence(path: pathlib.Path, error: Exception) -> str:
    """What an error proves to be damaged, '' where it proves nothing; looks into the folders, and may raise OSError."""
    needed = [path / name for name in _NEEDED]
    if isinstance(error, FileNotFoundError) and error.filename:
        needed.append(pathlib.Path(error.filename))
    if missing := [
        str(file.relative_to(path)) for file in needed if file.is_relative_to(path) and _is_gone(path, file)
    ]:
        return f"{', '.join(missing)} is missing"
    if isinstance(error, FileNotFoundError) or errors.kind(error) == errors.OUT_OF_MEMORY:
        return ""
    said = f"{error.__cause__ or error}"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return f"one of its JSON files is none: {said}"
    if not (lost := _LOST.search(said)):
        return ""
    story = re.sub(r"\s+", " ", said.partition(" [tensorstore_spec")[0]).replace(f"{path}/", "").strip()
    return story if len(story) <= 200 else f"{lost[1]}: ...{story[-180:]}"  # what went wrong comes last


def _is_gone(root: pathlib.Path, file: pathlib.Path) -> bool:
    """Whether the folders below `root` themselves do not list the file: a stale handle may deny one that is there."""
    place = root
    for part in file.relative_to(root).parts:
        if part not in {entry.name for entry in place.iterdir()}:
            return True
        place /= part
    return False


def _alone() -> ocp.options.MultiprocessingOptions:
    """For readers: each process by itself, without a barrier that one that fails would not reach."""
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"reader{process}"
    )


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


def _describe(state: Any) -> dict[str, list]:
    """Dtype, shape and fingerprint of each array by its path, fit for JSON."""
    marks = jax.device_get(fingerprints(state))
    return _by_path(lambda x, mark: [str(x.dtype), list(x.shape), int(mark)], state, marks)


def _check_fit(step: int, there: dict[str, list], like: Any) -> None:
    def names(arrays: dict[str, list]) -> dict[str, str]:
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
