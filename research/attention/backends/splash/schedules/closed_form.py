"""`closed_form`: the same blocks as `static`, by interval arithmetic instead of evaluation of every block.

For sliding and HCA attention. The program computes each partial block from an offset, so it contains no large constant.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int8, Int32

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout
from research.attention.backends.splash.schedules import block_schedule
from research.attention.backends.splash.schedules.block_schedule import EMPTY, BlockSchedule

# The forward and the backward schedule, each with whether the kernel's grid is dynamic: see `mask_info`.
Plan = tuple[tuple[BlockSchedule, bool], tuple[BlockSchedule, bool]]


def kernel(layout: Layout, config: splash.SplashConfig, runtime: None = None) -> splash.SplashAttentionKernel:
    """The kernel for all sequences of a layout. Its schedule is cached."""
    del runtime
    plan = schedules(layout, config)
    return assemble(config, *(_with_partial_blocks(*part) for part in plan), plan)


@functools.lru_cache(maxsize=64)
def schedules(layout: Layout, config: splash.SplashConfig) -> Plan:
    """The forward and the backward schedule."""
    forward = block_schedule.build(layout, config.block_q, config.block_kv, transposed=False)
    backward = block_schedule.build(layout, config.block_q_dkv, config.block_kv_dkv, transposed=True)
    backward = block_schedule.with_empty_rows(backward, layout.kv_len // config.block_kv_dkv)
    return (forward, True), (backward, config.dq_reduction_steps == 3)


def mask_info(schedule: BlockSchedule, dynamic_grid: bool) -> splash.Info:
    """tokamax's form of a schedule, without the partial blocks, in NumPy arrays of the smallest integers that fit.

    Args:
      schedule: the blocks to visit.
      dynamic_grid: whether the kernel's grid has only the blocks of the schedule. Otherwise it has all blocks, and the
        kernel skips the computation of empty ones.
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
    """A multi-query kernel with the arguments that tokamax's own factories pass.

    Args:
      config: of the kernel.
      forward_info: the forward schedule.
      backward_info: the backward schedule.
      plan: both schedules, for the compiler's cost estimate.
      mask_function: computes partial blocks inside the kernel from the indices of rows and columns.
    """
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
    """The fraction of blocks that are not empty. The compiler's cost estimate is scaled by it."""
    layout = schedule.layout
    blocks = (layout.q_len // schedule.block_q) * (layout.kv_len // schedule.block_kv)
    return float(np.count_nonzero(schedule.kinds) / blocks)


def partial_blocks(
    schedule: BlockSchedule, attended: Bool[Array, "q_len compressed_len"] | None = None
) -> Int8[Array, "unique block_rows block_cols"]:
    """The distinct partial blocks, computed by the program; the barrier prevents constant folding."""
    return schedule.partial_blocks(lambda offsets: jax.lax.optimization_barrier(jnp.asarray(offsets)), attended)


def _with_partial_blocks(schedule: BlockSchedule, dynamic_grid: bool) -> splash.Info:
    info = jax.tree.map(jnp.asarray, mask_info(schedule, dynamic_grid))
    return info._replace(partial_mask_blocks=partial_blocks(schedule))


def _next_partial(partial: Int32[np.ndarray, " blocks"]) -> Int32[np.ndarray, " blocks"]:
    """The partial block to prefetch at each block: its own or the next one; after the last one the first."""
    at = np.flatnonzero(partial >= 0)
    following = np.searchsorted(at, np.arange(len(partial)))
    return partial[at[np.where(following == len(at), 0, following)]]


def _smallest(array: Int32[np.ndarray, " blocks"]) -> Int[np.ndarray, " blocks"]:
    """The array in the smallest integers that fit."""
    for dtype in (np.int8, np.int16):
        if array.max() <= np.iinfo(dtype).max:
            return array.astype(dtype)
    return array.astype(np.int32)
