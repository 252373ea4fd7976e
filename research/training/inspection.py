"""What is kept of a step that went wrong."""

import pathlib
import shutil

import jax
import numpy as np

from research.runs import checkpoints, files
from research.training.trainer import Trainer

FOLDER = "nonfinite"
_NAMED = 3  # documents that the message names; the file lists all


def keep(folder: pathlib.Path, trainer: Trainer) -> str:
    """Writes what reproduces a step, and says so.

    The run's folder gets `nonfinite/` with a checkpoint of the trainer's state (`checkpoints.read` reads it),
    `batch.npz`, and `documents.json`, the names of the documents that the batch's pieces are from.
    """
    there = folder / FOLDER
    names = trainer.data.documents(trainer.batch)
    if jax.process_index() == 0:
        shutil.rmtree(there, ignore_errors=True)  # of an earlier attempt
        there.mkdir()
        np.savez(there / "batch.npz", **trainer.batch)
        files.write_json(there / "documents.json", names)
    with checkpoints.Writer(there / checkpoints.FOLDER) as writer:
        writer.save(trainer.done, trainer.state, trainer.iterator.get_state())
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"state and batch are in {there}, the batch from {', '.join(names[:_NAMED])}{more}"
