"""Ways to turn the indexer's scores into a choice of entries, scores included."""

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from research import errors
from research.attention.attend import Documents
from research.attention.indexer import selection
from research.attention.indexer.module import select
from research.attention.indexer.scores import Index, Scoring, index_scores
from research.attention.visibility import CompressedSparse
from research.measure.program import Program, versions
from research.settings.config import Settings

APART = True  # memory is measured as the peak of a process
ENVIRONMENT: dict[str, str] = {}
_REPEATS = 3
_SCORING = Scoring()


def programs(settings: Settings, platform: str) -> list[Program]:
    """All ways, for one sequence that is one document."""
    del platform
    attention = {name: getattr(settings.attention, name) for name in ("top_k", "index_heads", "index_head_width")}
    attention["rope_width"] = min(attention["index_head_width"], settings.attention.rope_width)
    kept = Settings().replace(
        model={"layers": ("csa",)}, attention=attention, data={"seq_len": settings.data.seq_len, "batch_size": 1}
    )
    return [Program("selection", way, kept) for way in WAYS]


def timeout(settings: Settings) -> float:
    """Seconds for one program."""
    return settings.bench.timeout_minutes * 60


def identify(program: Program) -> dict[str, Any]:
    """The way, the sizes, and the versions."""
    attention, seq_len = program.settings.attention, program.settings.data.seq_len
    return {
        "way": program.what,
        "seq_len": seq_len,
        "top_k": attention.top_k,
        "heads": attention.index_heads,
        "width": attention.index_head_width,
        "entries": CompressedSparse.make(attention).num_entries(seq_len),
        "versions": versions("jax", "jaxlib"),
    }


def rows(program: Program) -> Iterator[dict[str, Any]]:
    """The one row of a way: seconds, temporaries and the process's peak in bytes; its `status` says why not, if so."""
    common = identify(program) | {"phase": "choose"}
    try:
        yield common | _measure(program)
    except Exception as error:
        yield common | {"status": errors.kind(error), "message": str(error)[:2000]}


def _measure(program: Program) -> dict[str, Any]:
    attention, seq_len = program.settings.attention, program.settings.data.seq_len
    visibility, keys = CompressedSparse.make(attention), jax.random.split(jax.random.key(0), 3)
    heads, width, entries = attention.index_heads, attention.index_head_width, visibility.num_entries(seq_len)
    index = Index(
        jax.random.normal(keys[0], (1, seq_len, heads, width)),
        jax.random.normal(keys[1], (1, entries, width)),
        jax.random.normal(keys[2], (1, seq_len, heads)),
    )
    way = WAYS[program.what]
    compiled = jax.jit(lambda index: way(index, visibility)).lower(index).compile()
    temp = compiled.memory_analysis().temp_size_in_bytes
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if temp > available:  # running it would have the kernel kill some process, not necessarily this one
        return {"temp_bytes": temp, "available_bytes": available, "status": "out of host memory"}
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(index))
        times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = {"seconds": statistics.median(times[1:]), "repeats": _REPEATS}
    return seconds | {"temp_bytes": temp, "peak_rss_bytes": peak, "status": "ok"}


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
    return index_scores(index, _SCORING), selection.visible_entries(visibility, _one_document(index).segments)


def _one_document(index: Index) -> Documents:
    return Documents.whole(*index.q.shape[:2])


WAYS: dict[str, Callable[[Index, CompressedSparse], jax.Array]] = {
    "one_hot": _one_hot,
    "threshold": _threshold,
    "streamed": _streamed,
}
PHASES = dict.fromkeys(WAYS, ("choose",))
