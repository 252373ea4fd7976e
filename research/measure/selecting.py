"""Ways to turn the indexer's scores into a choice: `python -m research.measure.selecting FILE` prints a JSON row.

A process of its own for every measurement; see `apart`.
"""

import dataclasses
import json
import os
import pathlib
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from research import errors
from research.attention.indexer.module import select, selection
from research.attention.indexer.scores import Index, Scoring, index_scores
from research.attention.visibility import CompressedSparse
from research.measure import apart

REPEATS = 3
_SCORING = Scoring()


@dataclasses.dataclass(frozen=True)
class Point:
    """One selection, batch 1: a name of `WAYS`, S, K, index heads and their width."""

    way: str
    seq_len: int
    top_k: int
    heads: int = 4
    width: int = 32


def row(point: Point, timeout: float) -> dict[str, Any]:
    """The point with seconds, temporaries and peak bytes of a process of its own; its `status` says why not, if so."""
    found, ending, message = apart.run("research.measure.selecting", json.dumps(dataclasses.asdict(point)), timeout, {})
    return found[0] if found else dataclasses.asdict(point) | {"status": ending, "message": message}


def _measure(point: Point) -> dict[str, Any]:
    visibility = CompressedSparse(128, 4, point.top_k)
    keys = jax.random.split(jax.random.key(0), 3)
    seq_len, entries = point.seq_len, visibility.num_entries(point.seq_len)
    index = Index(
        jax.random.normal(keys[0], (1, seq_len, point.heads, point.width)),
        jax.random.normal(keys[1], (1, entries, point.width)),
        jax.random.normal(keys[2], (1, seq_len, point.heads)),
    )
    way = WAYS[point.way]
    compiled = jax.jit(lambda index: way(index, visibility)).lower(index).compile()
    temp = compiled.memory_analysis().temp_size_in_bytes
    found = dataclasses.asdict(point) | {"entries": entries, "temp_bytes": temp, "status": "ok"}
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if temp > available:  # running it would have the kernel kill some process, not necessarily this one
        return found | {"status": "out of host memory", "available_bytes": available}
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(index))
        times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found | {"seconds": statistics.median(times[1:]), "repeats": REPEATS, "peak_rss_bytes": peak}


def _one_hot(index: Index, visibility: CompressedSparse) -> jax.Array:
    """The usual way: `top_k`'s indices as one-hot rows, [S, K, C], of which any may be set."""
    scores, visible = _all(index, visibility)
    found = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), min(visibility.top_k, scores.shape[-1]))[1]
    return jax.nn.one_hot(found, scores.shape[-1], dtype=jnp.bool_).any(axis=-2) & visible


def _threshold(index: Index, visibility: CompressedSparse) -> jax.Array:
    return selection.membership(*_all(index, visibility), visibility.top_k)


def _streamed(index: Index, visibility: CompressedSparse) -> jax.Array:
    return select(index, visibility, _one_document(index), _SCORING)


def _all(index: Index, visibility: CompressedSparse) -> tuple[jax.Array, jax.Array]:
    """All scores, and which entries are visible."""
    return index_scores(index, _SCORING), selection.visible_entries(visibility, _one_document(index))


def _one_document(index: Index) -> jax.Array:
    return jnp.zeros(index.q.shape[:2], jnp.int32)


WAYS: dict[str, Callable[[Index, CompressedSparse], jax.Array]] = {
    "one_hot": _one_hot,
    "threshold": _threshold,
    "streamed": _streamed,
}


def main(file: str) -> None:
    """Measures the point in the file."""
    point = Point(**json.loads(pathlib.Path(file).read_text(encoding="utf-8")))
    try:
        print(json.dumps(_measure(point)))
    except Exception as error:
        failed = {"status": errors.kind(error), "message": str(error)[:2000]}
        print(json.dumps(dataclasses.asdict(point) | failed))


if __name__ == "__main__":
    main(sys.argv[1])
