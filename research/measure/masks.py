"""What a schedule costs before anything runs: blocks, bytes by memory, and the time to build it."""

import contextlib
import dataclasses
import resource
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from research.attention import layout as layout_lib
from research.attention import schedules
from research.attention import tokamax_splash as splash
from research.attention.schedules import closed_form
from research.attention.visibility import Visibility

# Scalar memory of a TPU core; tokamax prefetches the whole schedule into it.
SMEM_BYTES = 2**20

# Per block the kernel also prefetches where rows of blocks begin and end, as two int32 made inside the program.
_BOUNDS_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Request:
    """A schedule to be measured: forward and backward kernel with the same blocks."""

    visibility: Visibility
    schedule: str
    seq_len: int
    block_q: int
    block_kv: int
    dq_reduction_steps: int = 3


def measure(request: Request) -> dict[str, Any]:
    """Builds the forward and backward schedule once and counts.

    Args:
      request: what to build. CSA's selection is drawn at random.

    Returns:
      One row. `active`, `full`, `partial` and `unique_partial` blocks and `useful_fraction` (visible over scheduled
      pairs) are the forward kernel's; bytes and seconds are of both kernels together: `host_bytes` and `hbm_bytes` of
      the masks in the program as it is handed over and on the device, `smem_bytes` of the larger prefetch,
      `fits_smem`, `schedule_seconds` for the lists of blocks alone, `build_seconds` with the partial blocks,
      `peak_rss_bytes` of the process so far.
    """
    lay = layout_lib.make(request.visibility, request.seq_len, (request.block_q,), (request.block_kv,))
    config = splash.SplashConfig(
        block_q=request.block_q,
        block_kv=request.block_kv,
        block_q_dkv=request.block_q,
        block_kv_dkv=request.block_kv,
        dq_reduction_steps=request.dq_reduction_steps or None,
    )
    name = schedules.resolve_name(request.schedule, request.visibility.kind)
    clock = _Clock()
    infos, unique = _build(request, name, lay, config, clock)
    blocks = sum(_bytes(info.partial_mask_blocks) for info in infos)
    dense = lay.q_len * lay.kv_len  # bytes of the mask as booleans
    kinds = np.asarray(infos[0].block_mask)
    active = int(np.count_nonzero(kinds))
    smem = max(smem_bytes(info) for info in infos)
    return {
        "schedule": name,
        "visibility": request.visibility.kind,
        "seq_len": request.seq_len,
        "block_q": request.block_q,
        "block_kv": request.block_kv,
        "active": active,
        "full": int(np.count_nonzero(kinds == 2)),
        "partial": int(np.count_nonzero(kinds == 1)),
        "unique_partial": unique,
        "useful_fraction": visible_pairs(request.visibility, request.seq_len)
        / (active * request.block_q * request.block_kv),
        "host_bytes": {"captured": dense, "static": blocks}.get(name, 0),
        "hbm_bytes": blocks + dense * (name in ("captured", "dynamic")),
        "smem_bytes": smem,
        "fits_smem": smem <= SMEM_BYTES,
        "schedule_seconds": clock.schedule,
        "build_seconds": clock.build,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def visible_pairs(visibility: Visibility, seq_len: int) -> int:
    """Pairs of a query and a key it sees, one document, by closed formula."""
    t = np.arange(seq_len, dtype=np.int64)
    pairs = np.minimum(t + 1, visibility.window).sum()
    if visibility.kind != "sliding":
        complete = visibility.num_entries(t + 1)
        pairs += (np.minimum(complete, visibility.top_k) if visibility.kind == "csa" else complete).sum()
    return int(pairs)


def smem_bytes(info: splash.MaskInfo) -> int:
    """Bytes the kernel prefetches into scalar memory: the lists of blocks, and where rows of blocks begin and end."""
    lists = sum(_bytes(x) for x in (info.active_rows, info.active_cols, info.mask_next, info.block_mask))
    return lists + (_BOUNDS_BYTES * info.active_rows.size if info.active_rows is not None else 0)


class _Clock:
    """Seconds from its making until the lists of blocks were there, and what was spent on top to build the rest."""

    def __init__(self):
        self._start = time.perf_counter()
        self.schedule = self.build = 0.0

    def listed(self) -> None:
        self.schedule = self.build = time.perf_counter() - self._start

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.build += time.perf_counter() - start


def _build(request, name, lay, config, clock) -> tuple[list[splash.MaskInfo], int]:
    """The forward and backward `MaskInfo`, and the number of distinct partial blocks held for the former."""
    if name in ("closed_form", "computed"):
        plan = closed_form.schedules(lay, config)
        infos = [closed_form.mask_info(*part) for part in plan]
        clock.listed()
        if name == "computed":
            infos = [info._replace(mask_next=None) for info in infos]
        else:
            made = [jax.jit(closed_form.partial_blocks, static_argnums=0).lower(part).compile() for part, _ in plan]
            with clock.going_on():  # compiling them is part of compiling the program
                blocks = jax.block_until_ready([make() for make in made])
            infos = [info._replace(partial_mask_blocks=x) for info, x in zip(infos, blocks, strict=True)]
        return infos, len(plan[0][0].offsets) * (name == "closed_form")
    kernel = schedules.TABLE[name].kernel(lay, config, _runtime_mask(request, lay))
    infos = jax.block_until_ready([kernel.fwd_mask_info, kernel.dkv_mask_info])
    clock.listed()
    return infos, len(infos[0].partial_mask_blocks)


def _runtime_mask(request: Request, lay: layout_lib.Layout) -> jax.Array | None:
    if request.schedule in ("captured", "static"):
        return None
    if request.visibility.kind != "csa":
        return lay.runtime_mask(None, None, None)
    chance = jax.random.uniform(jax.random.key(0), (lay.seq_len, lay.entries))
    complete = jnp.maximum(request.visibility.num_entries(jnp.arange(lay.seq_len) + 1), 1)[:, None]
    return lay.runtime_mask(None, None, chance < request.visibility.top_k / complete)


def _bytes(x: Any) -> int:
    return 0 if x is None else x.nbytes
