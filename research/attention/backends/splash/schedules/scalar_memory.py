"""What a schedule takes of a TPU core's scalar memory (SMEM), into which the kernel prefetches its lists of blocks."""

import math

import numpy as np

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout

# Of one core: what the compiler allows on v5p, and on v6e.
CAPACITY = 2**20

# Where rows of blocks begin and end, as two int32 per block that the kernel's wrapper adds to the lists.
_BOUNDS = 8


def listed(info: splash.Info) -> int:
    """Bytes of a schedule whose lists are known."""
    lists = (info.active_rows, info.active_cols, info.mask_next, info.block_mask)
    size = sum(x.nbytes for x in lists if x is not None)
    return size + (_BOUNDS * info.active_rows.size if info.active_rows is not None else 0)


def of_runtime_mask(layout: Layout, block_q: int, block_kv: int) -> tuple[int, int]:
    """Number of blocks, and bytes, of a schedule made from a mask at run time: it has room for all blocks."""
    blocks = (layout.q_len // block_q) * (layout.kv_len // block_kv)
    index = next(np.dtype(t).itemsize for t in (np.int8, np.int16, np.int32) if blocks <= np.iinfo(t).max)
    rows, cols, kinds = 4, 4, 1
    return blocks, blocks * (rows + cols + index + kinds + _BOUNDS)


def too_large(schedule: str, blocks: int, size: int) -> str:
    """What is allowed instead of a schedule whose list of that many blocks takes that many bytes."""
    return (
        f"one of active blocks only, or with larger blocks: the list of {blocks:,} blocks of {schedule} takes "
        f"{math.ceil(size / 1024):,} KiB of scalar memory, a TPU core has {CAPACITY // 1024:,}"
    )
