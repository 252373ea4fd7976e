"""How often a recall task is answered rightly, by the distance of the answer; see `research.data.recall`."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from research.data.packing import NO_TARGET
from research.data.recall import ranges
from research.metrics import Mean

_OF_RANGE = "accuracy_{}_to_{}"


def by_distance(logits: jax.Array, targets: jax.Array, distances: jax.Array) -> dict[str, Mean]:
    """The share of right answers, those whose token is the likeliest.

    Args:
      logits: [B, S, V].
      targets: int32 [B, S], the answers, `NO_TARGET` where nothing is asked.
      distances: int32 [B, S], of the answers.

    Returns:
      Of all as `accuracy`, and of every range of distances, `accuracy_16_to_31` for those from 16 to 31.
    """
    right = logits.argmax(axis=-1) == targets
    asked = {"accuracy": targets != NO_TARGET}
    for first, last in ranges(targets.shape[1]):
        asked[_OF_RANGE.format(first, last)] = (first <= distances) & (distances <= last)
    return {name: Mean((right & those).sum().astype(jnp.float32), those.sum()) for name, those in asked.items()}


def shares(row: dict[str, Any]) -> dict[tuple[int, int], float]:
    """The shares that a summary or a row of metrics holds, by first and last distance, in order."""
    pattern = "val_" + _OF_RANGE.format(r"(\d+)", r"(\d+)")
    found = {match: share for name, share in row.items() if (match := re.fullmatch(pattern, name))}
    return dict(sorted(((int(match[1]), int(match[2])), share) for match, share in found.items()))
