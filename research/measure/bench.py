"""Times single attentions on this machine's own devices."""

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from research import errors
from research.attention.product import product
from research.attention.spec import Spec
from research.measure.op import Op
from research.measure.program import Program, attention_alone, versions
from research.settings.config import Settings

# The last one holds what the first saves, and takes most memory.
PHASES = {"op": ("forward", "forward_backward", "backward")}
APART = True  # what one point allocates, caches or crashes does not touch the next
ENVIRONMENT: dict[str, str] = {}


def programs(settings: Settings, platform: str) -> list[Program]:
    """The attention of every kind of layer in a config."""
    del platform
    repeats = {"repeats": settings.bench.repeats}
    kinds = settings.model.kinds
    return [Program("bench", "op", attention_alone(settings, kind).replace(bench=repeats)) for kind in kinds]


def timeout(settings: Settings) -> float:
    """Seconds for one program."""
    return settings.bench.timeout_minutes * 60


def identify(program: Program) -> dict[str, Any]:
    """See `Program.identify`."""
    return program.identify() | {"versions": versions("jax", "jaxlib", "tokamax")}


def rows(program: Program) -> Iterator[dict[str, Any]]:
    """A row per phase, as it is done; one that fails is a row with its error's kind."""
    spec = Spec.make(program.settings)
    (kind,) = spec.kinds
    op = Op.make(spec, kind)
    effective = op.attend.effective(op.sizes)
    common = identify(program) | {
        "backend": spec.backend,
        "schedule": effective.get("schedule", ""),
        "effective": effective,
        "matmul_flops_per_second": matmul_flops_per_second(op.sizes.dtype),
    }
    for phase in PHASES["op"]:
        try:
            yield common | measure(op, phase, program.settings.bench.repeats)
        except Exception as error:
            yield common | {"phase": phase, "status": errors.kind(error), "message": str(error)[:2000]}


def measure(op: Op, phase: str, repeats: int) -> dict[str, Any]:
    """Compiles and runs one phase on random arguments, one document per row; CSA selects at random.

    The backward phase is a program of its own, from what the forward one saves to the gradients.

    Returns:
      Seconds for lowering, compiling and, as the median and the interquartile range of the repeats, running; the
      compiler's bytes; useful FLOPs (those of visible pairs alone) and their rate; `status` "ok".

    Raises: whatever lowering, compiling or running raises.
    """
    given, selected = op.arguments()

    def forward(arguments: dict[str, jax.Array]) -> jax.Array:
        return op(arguments, selected)

    def loss(arguments: dict[str, jax.Array]) -> jax.Array:
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
    times = [_seconds(compiled, *given) for _ in range(repeats + 1)][1:]
    memory, seconds, flops = compiled.memory_analysis(), statistics.median(times), op.useful_flops(phase)
    return {
        "phase": phase,
        "seconds": seconds,
        "seconds_spread": _interquartile(times),
        "repeats": repeats,
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


def matmul_flops_per_second(dtype: str, size: int = 2048, repeats: int = 5) -> float:
    """What this device reaches on a plain product of two [size, size] matrices: the best of the repeats."""
    x = jnp.ones((size, size), dtype)
    compiled = jax.jit(lambda a, b: product("ij,jk->ik", a, b)).lower(x, x).compile()
    return 2 * size**3 / min(_seconds(compiled, x, x) for _ in range(repeats + 1))


def _seconds(compiled: Callable, *arguments: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - start


def _interquartile(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return third - first
