"""`closed_form`: the same blocks as `static`, from interval arithmetic instead of evaluating every block.

Serves sliding and HCA attention. The partial blocks are made inside the program from one offset each, so that no
large constant enters it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int8

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout
from research.attention.backends.splash.schedules import block_schedule
from research.attention.backends.splash.schedules.block_schedule import EMPTY, BlockSchedule

# The forward and the backward schedule, each with whether only its blocks are visited or the whole grid.
Plan = tuple[tuple[BlockSchedule, bool], tuple[BlockSchedule, bool]]


def kernel(layout: Layout, config: splash.SplashConfig, given: None = None) -> splash.SplashAttentionKernel:
    """A kernel for every sequence of that layout; its schedule is built once."""
    del given
    plan = schedules(layout, config)
    return assemble(config, *(_with_partial_blocks(*part) for part in plan), plan)


@functools.lru_cache(maxsize=64)
def schedules(layout: Layout, config: splash.SplashConfig) -> Plan:
    """The forward and backward schedule, each with whether only its blocks are visited or the whole grid."""
    forward = block_schedule.build(layout, config.block_q, config.block_kv, transposed=False)
    backward = block_schedule.build(layout, config.block_q_dkv, config.block_kv_dkv, transposed=True)
    backward = block_schedule.with_empty_rows(backward, layout.kv_len // config.block_kv_dkv)
    return (forward, True), (backward, config.dq_reduction_steps == 3)


def mask_info(schedule: BlockSchedule, dynamic_grid: bool) -> splash.Info:
    """tokamax's form of a schedule, its partial blocks left out; NumPy arrays of the smallest integers that fit.

    Args:
      schedule: what to visit.
      dynamic_grid: whether the kernel visits the schedule's blocks only, or all, the empty ones doing nothing.
    """
    kinds, partial = schedule.kinds, schedule.partial
    if not dynamic_grid:
        layout = schedule.layout
        shape = (layout.kv_len // schedule.block_kv, layout.q_len // schedule.block_q)
        kinds, partial = np.full(shape, EMPTY, np.int32), np.full(shape, -1, np.int32)
        kinds[schedule.rows, schedule.cols] = schedule.kinds
        partial[schedule.rows, schedule.cols] = schedule.partial
        kinds, partial = kinds.reshape(-1), partial.reshape(-1)
    return splash.MaskInfo(
        mask_next=_smallest(_next_partial(partial)),
        active_rows=_smallest(schedule.rows) if dynamic_grid else None,
        active_cols=_smallest(schedule.cols) if dynamic_grid else None,
        block_mask=_smallest(kinds),
        num_active_blocks=np.array([len(schedule.rows)], np.int32) if dynamic_grid else None,
        partial_mask_blocks=None,
        q_sequence=None,
    )


def assemble(
    config: splash.SplashConfig,
    forward_info: splash.Info,
    backward_info: splash.Info,
    plan: Plan,
    mask_function: Callable | None = None,
) -> splash.SplashAttentionKernel:
    """A shared-key kernel over two `MaskInfo`s of the schedules in `plan`, as tokamax's own factory would call it."""
    forward, backward = (_fraction(schedule) for schedule, _ in plan)
    return splash.SplashAttentionKernel(
        forward_info,
        backward_info,
        config=config,
        is_mqa=True,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        mask_function=mask_function,
        fwd_mask_sparsity=forward,
        dkv_mask_sparsity=backward,
    )


def _fraction(schedule: BlockSchedule) -> float:
    """Of all blocks, those that are not empty; the compiler's cost estimate is scaled by it."""
    layout = schedule.layout
    blocks = (layout.q_len // schedule.block_q) * (layout.kv_len // schedule.block_kv)
    return float(np.count_nonzero(schedule.kinds) / blocks)


def partial_blocks(
    schedule: BlockSchedule, attended: Bool[Array, "q_len compressed_len"] | None = None
) -> Int8[Array, "unique rows cols"]:
    """The schedule's partial blocks, made inside the program; the barrier keeps the compiler from folding them."""
    return schedule.partial_blocks(lambda offsets: jax.lax.optimization_barrier(jnp.asarray(offsets)), attended)


def _with_partial_blocks(schedule: BlockSchedule, dynamic_grid: bool) -> splash.Info:
    info = jax.tree.map(jnp.asarray, mask_info(schedule, dynamic_grid))
    return info._replace(partial_mask_blocks=partial_blocks(schedule))


def _next_partial(partial: np.ndarray) -> np.ndarray:
    """For every block the partial one to be fetched: its own, or the next one's; after the last the first one's."""
    at = np.flatnonzero(partial >= 0)
    following = np.searchsorted(at, np.arange(len(partial)))
    return partial[at[np.where(following == len(at), 0, following)]]


def _smallest(array: np.ndarray) -> np.ndarray:
    for dtype in (np.int8, np.int16):
        if array.max() <= np.iinfo(dtype).max:
            return array.astype(dtype)
    return array.astype(np.int32)
