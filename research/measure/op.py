"""Times and sizes of one layer's attention: `python -m research.measure.op POINT.json` prints a JSON row per phase.

A process of its own for every point: what one point allocates, caches or crashes does not touch the next.
"""

import dataclasses
import json
import pathlib
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from research import errors
from research.attention import backends
from research.attention.indexer import selection
from research.attention.product import product
from research.attention.visibility import Visibility

PHASES = ("forward", "forward_backward", "backward")  # the last one holds what the first saves, and takes most memory
# Of the size of one forward product q.k: forward has 2 (q.k, weights.v), backward 5 more (q.k again, and d_weights,
# d_q, d_k, d_v).
PRODUCTS = {"forward": 2, "backward": 5, "forward_backward": 7}


@dataclasses.dataclass(frozen=True)
class Point:
    """One attention to be measured; fields as in `research.config`, sizes of the arguments of `attend`."""

    backend: str
    options: backends.Options
    visibility: Visibility
    batch: int
    seq_len: int
    heads: int
    head_width: int
    dtype: str
    repeats: int


def measure(point: Point, phase: str) -> dict[str, Any]:
    """Compiles and runs one phase on random arguments, one document per row; CSA selects at random.

    The backward phase is a program of its own, from what the forward one saves to the gradients.

    Returns:
      A row: what was asked and what took effect; seconds for lowering, compiling and, as the median and the
      interquartile range of the repeats, running; the compiler's bytes; useful FLOPs (those of visible pairs alone)
      and their rate, beside the rate of this machine's own product of matrices in the same dtype; `status` "ok".

    Raises: whatever lowering, compiling or running raises.
    """
    given, selected = arguments(point)

    def forward(arguments):
        return attend(point, arguments, selected)

    def loss(arguments):
        return forward(arguments).astype(jnp.float32).sum()

    program, given = {"forward": forward, "forward_backward": jax.grad(loss)}.get(phase), (given,)
    if program is None:
        out, pull_back = jax.jit(lambda arguments: jax.vjp(forward, arguments))(*given)
        program, given = (lambda pull_back, d_out: pull_back(d_out)), (pull_back, jnp.ones_like(out))

    start = time.perf_counter()
    lowered = jax.jit(program).lower(*given)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    times = [_time(compiled, *given) for _ in range(point.repeats + 1)][1:]
    memory, seconds = compiled.memory_analysis(), statistics.median(times)
    flops = useful_flops(point, phase)
    return {
        "phase": phase,
        "seconds": seconds,
        "seconds_spread": _interquartile(times),
        "repeats": point.repeats,
        "lower_seconds": middle - start,
        "compile_seconds": end - middle,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "useful_flops": flops,
        "useful_flops_per_second": flops / seconds,
        "status": "ok",
    }


def useful_flops(point: Point, phase: str) -> int:
    """FLOPs of the products over visible pairs alone."""
    pairs = point.batch * point.heads * point.visibility.pairs(point.seq_len)
    return PRODUCTS[phase] * 2 * pairs * point.head_width


def matmul_flops_per_second(dtype: str, size: int = 2048, repeats: int = 5) -> float:
    """What this device reaches on a plain product of two [size, size] matrices: the best of the repeats."""
    x = jnp.ones((size, size), dtype)
    compiled = jax.jit(lambda a, b: product("ij,jk->ik", a, b)).lower(x, x).compile()
    return 2 * size**3 / min(_time(compiled, x, x) for _ in range(repeats + 1))


def rows(point: Point) -> Iterator[dict[str, Any]]:
    """`measure` of all phases, as they are done; one that fails is a row with its error's kind."""
    effective = backends.get(point.backend).resolve(
        point.visibility, point.seq_len, point.heads, point.head_width, point.dtype, point.options, packed=False
    )
    common = {
        "backend": point.backend,
        "schedule": effective.get("schedule", ""),
        "visibility": point.visibility.kind,
        **{name: getattr(point, name) for name in ("batch", "seq_len", "heads", "head_width", "dtype")},
        "requested": dataclasses.asdict(point.options),
        "effective": effective,
        "matmul_flops_per_second": matmul_flops_per_second(point.dtype),
    }
    for phase in PHASES:
        try:
            yield common | measure(point, phase)
        except Exception as error:
            yield common | {"phase": phase, "status": errors.kind(error), "message": str(error)[:2000]}


def attend(
    point: Point,
    arguments: dict[str, jax.Array],
    selected: jax.Array | None,
    target: backends.Target | None = None,
) -> jax.Array:
    """The attention of a point, on `arguments`; `target` as in `backends.Backend`."""
    return backends.get(point.backend).attend(
        **arguments, visibility=point.visibility, selected=selected, options=point.options, target=target
    )


def arguments(point: Point) -> tuple[dict[str, jax.Array], jax.Array | None]:
    """Random arguments of `attend` by which one differentiates, and a random selection for CSA."""
    keys = jax.random.split(jax.random.key(0), 4)
    entries = point.visibility.num_entries(point.seq_len)
    shapes = {
        "q": (point.batch, point.seq_len, point.heads, point.head_width),
        "local": (point.batch, point.seq_len, point.head_width),
        "compressed": (point.batch, entries, point.head_width),
    }
    found = {
        name: jax.random.normal(key, shape, point.dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    found["sinks"] = jnp.zeros(point.heads)
    selected = None
    if point.visibility.selects:
        visible = selection.visible_entries(point.visibility, jnp.zeros((point.batch, point.seq_len), jnp.int32))
        selected = selection.membership(jax.random.uniform(keys[3], visible.shape), visible, point.visibility.top_k)
    return found, selected


def _time(compiled, *arguments) -> float:
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - start


def _interquartile(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return third - first


def to_json(point: Point) -> str:
    """A point as text; `from_json` reads it."""
    return json.dumps(dataclasses.asdict(point) | {"kind": point.visibility.kind})


def from_json(text: str) -> Point:
    """Inverse of `to_json`."""
    fields = json.loads(text)
    visibility = {cls.kind: cls for cls in Visibility.__args__}[fields.pop("kind")](**fields.pop("visibility"))
    return Point(options=backends.Options(**fields.pop("options")), visibility=visibility, **fields)


if __name__ == "__main__":
    for row in rows(from_json(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))):
        print(json.dumps(row), flush=True)
