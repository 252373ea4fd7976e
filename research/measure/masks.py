"""What a schedule costs before anything runs: blocks, bytes by memory, and the time to build it."""

import contextlib
import dataclasses
import functools
import math
import resource
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from research import errors
from research.attention.attend import Attend, Effective
from research.attention.backends.splash import attend, schedules
from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout
from research.attention.backends.splash.schedules import closed_form, scalar_memory
from research.attention.spec import Spec
from research.attention.visibility import Visibility
from research.measure.program import Program, attention_alone, versions
from research.settings.config import Settings

PHASES = {"schedule": ("build",)}
APART = False  # what is built is small, and a process takes longer to start
ENVIRONMENT: dict[str, str] = {}
_CHOSEN = (
    "block_q",
    "block_kv",
    "block_q_dkv",
    "block_kv_dkv",
    "dq_reduction_steps",
)  # by the backend, where left open


def programs(settings: Settings, platform: str = "tpu") -> list[Program]:
    """The schedule of every kind of layer under splash, as it takes effect; none under other backends."""
    del platform
    if Spec.make(settings, "tpu").backend != "splash":
        return []
    found = []
    for kind in settings.model.kinds:
        alone = attention_alone(settings, kind).replace(attention={"backend": "splash"}, data={"batch_size": 1})
        op, effective = _resolved(alone)
        chosen = {name: effective[name] for name in _CHOSEN} | {op.schedule_setting: effective["schedule"]}
        found.append(Program("masks", "schedule", alone.replace(attention=chosen)))
    return found


def timeout(settings: Settings) -> float:
    """Never: it is built in this process."""
    del settings
    return math.inf


def identify(program: Program) -> dict[str, Any]:
    """See `Program.identify`; of the settings those in effect alone."""
    found = program.identify() | {"versions": versions("jax", "tokamax")}
    del found["requested"]
    return found


def rows(program: Program) -> Iterator[dict[str, Any]]:
    """The one row of a schedule."""
    common = identify(program) | {"phase": "build"}
    try:
        yield common | measure(program) | {"status": "ok"}
    except Exception as error:
        yield common | {"status": errors.kind(error), "message": str(error)[:2000]}


def measure(program: Program) -> dict[str, Any]:
    """Builds the forward and backward schedule once and counts.

    Args:
      program: what to build. CSA's selection is drawn at random.

    Returns:
      One row. `active`, `full`, `partial` and `unique_partial` blocks and `useful_fraction` (visible over scheduled
      pairs) are the forward kernel's; `scheduled` blocks are those of the
      longer list of the two; bytes and seconds are of both kernels together: `host_bytes` and `hbm_bytes` of
      the masks in the program as it is handed over and on the device, `smem_bytes` of the larger prefetch,
      `fits_smem`, `schedule_seconds` for the lists of blocks alone, `build_seconds` with the partial blocks,
      `peak_rss_bytes` of the process so far.
    """
    (op, effective), seq_len = _resolved(program.settings), program.settings.data.seq_len
    lay, config = attend.kernel_arguments(op.visibility, seq_len, effective)
    name, clock, block_q, block_kv = effective["schedule"], _Clock(), effective["block_q"], effective["block_kv"]
    infos, held, unique = _build(op.visibility, name, lay, config, clock)
    blocks = sum(held)
    dense = lay.q_len * lay.kv_len  # bytes of the mask as booleans
    kinds = np.asarray(infos[0].block_mask)
    active = int(np.count_nonzero(kinds))
    larger = max(infos, key=scalar_memory.listed)
    smem = scalar_memory.listed(larger)
    return {
        "schedule": name,
        "effective": effective,
        "block_q": block_q,
        "block_kv": block_kv,
        "dq_reduction_steps": effective["dq_reduction_steps"],
        "active": active,
        "full": int(np.count_nonzero(kinds == 2)),
        "partial": int(np.count_nonzero(kinds == 1)),
        "unique_partial": unique,
        "useful_fraction": op.visibility.pairs(seq_len) / (active * block_q * block_kv),
        "scheduled": larger.block_mask.size,
        "host_bytes": {"captured": dense, "static": blocks}.get(name, 0),
        "hbm_bytes": blocks + dense * (name in ("captured", "dynamic")),
        "smem_bytes": smem,
        "fits_smem": smem <= scalar_memory.CAPACITY,
        "schedule_seconds": clock.schedule or clock.build,
        "build_seconds": clock.build,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def block_grid(program: Program) -> tuple[np.ndarray, int, Effective]:
    """The forward schedule as kinds of blocks [q blocks, key blocks]; how many columns are local keys; what it used."""
    op, effective = _resolved(program.settings)
    lay, config = attend.kernel_arguments(op.visibility, program.settings.data.seq_len, effective)
    (info, _), *_ = _build(op.visibility, effective["schedule"], lay, config, _Clock())
    grid = np.zeros((lay.q_len // config.block_q, lay.kv_len // config.block_kv), np.int32)
    active = np.asarray(info.block_mask) > 0
    rows, cols = (np.asarray(x)[active].astype(np.int32) for x in (info.active_rows, info.active_cols))
    grid[rows, cols] = np.asarray(info.block_mask)[active]
    return grid, lay.local_len // config.block_kv, effective


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


def _build(
    visibility: Visibility, name: str, lay: Layout, config: splash.SplashConfig, clock: _Clock
) -> tuple[list[splash.Info], list[int], int]:
    """The forward and backward `MaskInfo`, the bytes of their partial blocks, and how many the former has."""
    entry = schedules.TABLE[name]
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

    def build(given: jax.Array | None = None) -> list[splash.Info]:
        kernel = entry.kernel(lay, config, given)
        return [kernel.fwd_mask_info, kernel.dkv_mask_info]

    if entry.runtime_mask or visibility.selects:
        chosen = _choice(visibility, lay) if visibility.selects else None
        given = lay.runtime_mask(None, None, chosen) if entry.runtime_mask else chosen
        build = functools.partial(jax.jit(build).lower(given).compile(), given)  # compiling is the program's
    with clock.going_on():
        infos = jax.block_until_ready(build())
    return infos, [_bytes(info.partial_mask_blocks) for info in infos], len(infos[0].partial_mask_blocks)


def _resolved(settings: Settings) -> tuple[Attend, Effective]:
    """The op of the one kind of layers, and what takes effect on a TPU."""
    spec = Spec.make(settings, "tpu")
    op = spec.attend(*spec.kinds)
    return op, op.effective(spec.sizes(packed=False))


def _choice(visibility: Visibility, lay: Layout) -> jax.Array:
    chance = jax.random.uniform(jax.random.key(0), (lay.seq_len, lay.entries))
    complete = jnp.maximum(visibility.num_entries(jnp.arange(lay.seq_len) + 1), 1)[:, None]
    return chance < visibility.top_k / complete


def _bytes(x: Any) -> int:
    return 0 if x is None else x.nbytes
