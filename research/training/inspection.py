"""What is kept of a step that went wrong."""

import pathlib
import shutil

import jax
import numpy as np

from research.runs import checkpoints, files
from research.training.trainer import Trainer

FOLDER = "nonfinite"
_NAMED = 3  # documents that the message names; the file lists all


def keep(folder: pathlib.Path, trainer: Trainer, *, validating: bool) -> str:
    """Writes what reproduces a step, or the validation after one, and says so.

    The run's folder gets `nonfinite/` with a checkpoint of the trainer (`checkpoints.read` reads it), under the number
    of updates that made its state, N - 1 for a step N that went wrong; `batch.npz`; and `documents.json`, the names of
    the documents that the batch's pieces are from.

    Args:
      folder: the run's.
      trainer: after the step.
      validating: whether the validation went wrong, with `trainer.nonfinite_batch`, and not the step, with
        `trainer.batch`.
    """
    there = folder / FOLDER
    batch = trainer.nonfinite_batch if validating else trainer.batch
    names = trainer.data.documents(batch, validation=validating)
    if jax.process_index() == 0:
        shutil.rmtree(there, ignore_errors=True)  # of an earlier attempt
        there.mkdir()
        np.savez(there / "batch.npz", **batch)
        files.write_json(there / "documents.json", names)
    with checkpoints.Writer(there / checkpoints.FOLDER) as writer:
        writer.save(trainer.done, trainer.state, trainer.iterator.get_state())
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    what = "state and validation batch" if validating else "state and batch"
    return f"{what} are in {there}, the batch from {', '.join(names[:_NAMED])}{more}"
