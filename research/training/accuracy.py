"""How often a recall task is answered rightly, by the distance of the answer; see `research.data.recall`."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import haiku as hk
import jax
import numpy as np

from research.data.packing import NO_TARGET, Batch
from research.data.recall import ranges

_OF_ALL = "val_accuracy"
_OF_RANGE = _OF_ALL + "_{}_to_{}"


def hits(model: hk.Transformed, params: hk.Params, batch: Batch) -> jax.Array:
    """bool [B, S]: whether the likeliest token is the target."""
    logits = model.apply(params, None, batch["inputs"], batch["positions"], batch["segments"])
    return logits.argmax(axis=-1) == batch["targets"]


def by_distance(hits_of: Callable[[Batch], jax.Array], batches: Iterable[Batch]) -> dict[str, float]:
    """The share of right answers: of all as `val_accuracy`, and of each range of distances that was asked for.

    Args:
      hits_of: a batch's bool [B, S].
      batches: of a recall task.

    Returns:
      Numbers from 0 to 1 by name, `val_accuracy_16_to_31` for the distances from 16 to 31.
    """
    right, distances = [], []
    for batch in batches:
        asked = batch["targets"] != NO_TARGET
        right.append(np.asarray(hits_of(batch))[asked])
        distances.append(batch["distances"][asked])
        seq_len = asked.shape[1]
    right, distances = np.concatenate(right), np.concatenate(distances)
    shares = {_OF_ALL: right.mean().item()}
    for first, last in ranges(seq_len):
        within = (first <= distances) & (distances <= last)
        if within.any():
            shares[_OF_RANGE.format(first, last)] = right[within].mean().item()
    return shares


def shares(row: dict[str, Any]) -> dict[tuple[int, int], float]:
    """The shares that a summary or a row of metrics holds, by first and last distance, in order."""
    pattern = _OF_RANGE.format(r"(\d+)", r"(\d+)")
    found = {match: share for name, share in row.items() if (match := re.fullmatch(pattern, name))}
    return dict(sorted(((int(match[1]), int(match[2])), share) for match, share in found.items()))
