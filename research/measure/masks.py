"""What a schedule costs before anything runs: blocks, bytes by memory, and the time to build it."""

import contextlib
import dataclasses
import functools
import resource
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash import layout as layout_lib
from research.attention.backends.splash import schedules
from research.attention.backends.splash.schedules import closed_form, scalar_memory
from research.attention.visibility import Visibility


@dataclasses.dataclass(frozen=True)
class Request:
    """A schedule to be measured, by its name in `schedules.TABLE`; forward and backward kernel have the same blocks."""

    visibility: Visibility
    schedule: str
    seq_len: int
    block_q: int
    block_kv: int
    dq_reduction_steps: int


def measure(request: Request) -> dict[str, Any]:
    """Builds the forward and backward schedule once and counts.

    Args:
      request: what to build. CSA's selection is drawn at random.

    Returns:
      One row. `active`, `full`, `partial` and `unique_partial` blocks and `useful_fraction` (visible over scheduled
      pairs) are the forward kernel's; `scheduled` blocks are those of the
      longer list of the two; bytes and seconds are of both kernels together: `host_bytes` and `hbm_bytes` of
      the masks in the program as it is handed over and on the device, `smem_bytes` of the larger prefetch,
      `fits_smem`, `schedule_seconds` for the lists of blocks alone, `build_seconds` with the partial blocks,
      `peak_rss_bytes` of the process so far.
    """
    lay, config = _layout(request), _config(request)
    name, clock = request.schedule, _Clock()
    infos, held, unique = _build(request, lay, config, clock)
    blocks = sum(held)
    dense = lay.q_len * lay.kv_len  # bytes of the mask as booleans
    kinds = np.asarray(infos[0].block_mask)
    active = int(np.count_nonzero(kinds))
    larger = max(infos, key=scalar_memory.listed)
    smem = scalar_memory.listed(larger)
    return {
        "schedule": name,
        "visibility": request.visibility.kind,
        "seq_len": request.seq_len,
        "block_q": request.block_q,
        "block_kv": request.block_kv,
        "dq_reduction_steps": request.dq_reduction_steps,
        "active": active,
        "full": int(np.count_nonzero(kinds == 2)),
        "partial": int(np.count_nonzero(kinds == 1)),
        "unique_partial": unique,
        "useful_fraction": request.visibility.pairs(request.seq_len) / (active * request.block_q * request.block_kv),
        "scheduled": larger.block_mask.size,
        "host_bytes": {"captured": dense, "static": blocks}.get(name, 0),
        "hbm_bytes": blocks + dense * (name in ("captured", "dynamic")),
        "smem_bytes": smem,
        "fits_smem": smem <= scalar_memory.CAPACITY,
        "schedule_seconds": clock.schedule or clock.build,
        "build_seconds": clock.build,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def block_grid(request: Request) -> tuple[np.ndarray, int]:
    """The forward schedule as kinds of blocks [q blocks, key blocks], and how many of the columns are local keys."""
    lay, config = _layout(request), _config(request)
    (info, _), *_ = _build(request, lay, config, _Clock())
    grid = np.zeros((lay.q_len // request.block_q, lay.kv_len // request.block_kv), np.int32)
    active = np.asarray(info.block_mask) > 0
    rows, cols = (np.asarray(x)[active].astype(np.int32) for x in (info.active_rows, info.active_cols))
    grid[rows, cols] = np.asarray(info.block_mask)[active]
    return grid, lay.local_len // request.block_kv


@dataclasses.dataclass
class _Clock:
    """Seconds spent on the lists of blocks, 0 where they are not made apart, and on everything."""

    schedule: float = 0.0
    build: float = 0.0

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.build += time.perf_counter() - start


def _build(request, lay, config, clock) -> tuple[list[splash.MaskInfo], list[int], int]:
    """The forward and backward `MaskInfo`, the bytes of their partial blocks, and how many the former has."""
    name, entry = request.schedule, schedules.TABLE[request.schedule]
    if name in ("closed_form", "computed"):
        with clock.going_on():
            plan = closed_form.schedules.__wrapped__(lay, config)  # validation may have built it before
            infos, held = [closed_form.mask_info(*part) for part in plan], [0, 0]
        clock.schedule = clock.build
        if name == "computed":
            infos = [info._replace(mask_next=None) for info in infos]
        else:
            for number, (schedule, _) in enumerate(plan):
                make = jax.jit(closed_form.partial_blocks, static_argnums=0).lower(schedule).compile()
                with clock.going_on():  # compiling is part of compiling the program
                    held[number] = jax.block_until_ready(make()).nbytes
        return infos, held, len(plan[0][0].offsets) * (name == "closed_form")

    def build(given=None):
        kernel = entry.kernel(lay, config, given)
        return [kernel.fwd_mask_info, kernel.dkv_mask_info]

    if entry.runtime_mask or request.visibility.selects:
        chosen = _choice(request, lay) if request.visibility.selects else None
        given = lay.runtime_mask(None, None, chosen) if entry.runtime_mask else chosen
        build = functools.partial(jax.jit(build).lower(given).compile(), given)  # compiling is the program's
    with clock.going_on():
        infos = jax.block_until_ready(build())
    return infos, [_bytes(info.partial_mask_blocks) for info in infos], len(infos[0].partial_mask_blocks)


def _layout(request: Request) -> layout_lib.Layout:
    return layout_lib.make(request.visibility, request.seq_len, (request.block_q,), (request.block_kv,))


def _config(request: Request) -> splash.SplashConfig:
    return splash.SplashConfig(
        block_q=request.block_q,
        block_kv=request.block_kv,
        block_q_dkv=request.block_q,
        block_kv_dkv=request.block_kv,
        dq_reduction_steps=request.dq_reduction_steps or None,
    )


def _choice(request: Request, lay: layout_lib.Layout) -> jax.Array:
    chance = jax.random.uniform(jax.random.key(0), (lay.seq_len, lay.entries))
    complete = jnp.maximum(request.visibility.num_entries(jnp.arange(lay.seq_len) + 1), 1)[:, None]
    return chance < request.visibility.top_k / complete


def _bytes(x: Any) -> int:
    return 0 if x is None else x.nbytes
