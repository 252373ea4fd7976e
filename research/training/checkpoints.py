"""Checkpoints: the state, and where the data iterator stands, under the number of updates done."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from research.training.step import State

FOLDER = "checkpoints"  # of a run's own


def newest(folder: pathlib.Path, like: State) -> State:
    """The state at the newest checkpoint of another run.

    Args:
      folder: the run's.
      like: gives the tree, shapes, dtypes and shardings.

    Raises:
      ValueError: there is none, or its state is of another shape.
    """
    steps = list((folder / FOLDER).glob("[0-9]*"))  # looked at first, for `Checkpoints` would make the folder
    if not steps:
        raise ValueError(f"{folder} holds no checkpoints; must be the id of a run in the same run.root, or its path")
    saved = Checkpoints(folder / FOLDER)
    try:
        return saved.restore(saved.latest(), like)[0]
    except ValueError as error:  # of orbax, many lines long
        raise ValueError(f"{folder}: {str(error).splitlines()[0]}") from error
    finally:
        saved.close()


class Checkpoints:
    """The newest checkpoint of a run; the one before is removed once it is whole on the disk."""

    def __init__(self, folder: pathlib.Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int:
        """Updates done at the newest checkpoint; 0 where there is none."""
        return self._manager.latest_step() or 0

    def save(self, step: int, state: State, iterator: dict[str, Any]) -> None:
        """Writes a checkpoint; `iterator` is the data iterator's `get_state()`."""
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), iterator=ocp.args.JsonSave(iterator))
        self._manager.save(step, args=items)

    def restore(self, step: int, like: State) -> tuple[State, dict[str, Any]]:
        """Reads a checkpoint; `like` gives the tree, shapes, dtypes and shardings."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), iterator=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        return restored.state, restored.iterator

    def close(self) -> None:
        """Ends the manager's threads."""
        self._manager.close()
