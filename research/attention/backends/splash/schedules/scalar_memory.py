"""The scalar memory (SMEM) of a TPU core that a schedule takes. The kernel prefetches its lists of blocks into it."""

import math

import numpy as np

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout

# Bytes that the compiler allows a core on v5p and v6e.
CAPACITY = 2**20

# Bytes per block of the two int32 lists that the kernel's wrapper adds: where rows of blocks begin and end.
_BOUNDS = 8


def listed(info: splash.Info) -> int:
    """Bytes of a schedule that is known at compile time."""
    lists = (info.active_rows, info.active_cols, info.mask_next, info.block_mask)
    size = sum(x.nbytes for x in lists if x is not None)
    return size + (_BOUNDS * info.active_rows.size if info.active_rows is not None else 0)


def runtime_lists(layout: Layout, block_q: int, block_kv: int) -> tuple[int, int]:
    """Number of blocks and bytes of a schedule that is computed at run time, whose lists have room for all blocks."""
    blocks = (layout.q_len // block_q) * (layout.kv_len // block_kv)
    index = next(np.dtype(t).itemsize for t in (np.int8, np.int16, np.int32) if blocks <= np.iinfo(t).max)
    rows, cols, kinds = 4, 4, 1
    return blocks, blocks * (rows + cols + index + kinds + _BOUNDS)


def too_large(schedule: str, blocks: int, size: int) -> str:
    """The `allowed` part of the error for a schedule whose lists of that many blocks take that many bytes."""
    return (
        f"one of active blocks only, or with larger blocks: the list of {blocks:,} blocks of {schedule} takes "
        f"{math.ceil(size / 1024):,} KiB of scalar memory, a TPU core has {CAPACITY // 1024:,}"
    )
