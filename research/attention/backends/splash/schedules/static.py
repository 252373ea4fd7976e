"""`static`: tokamax evaluates the visibility block by block on the host, before compiling (seed 001).

Serves sliding and HCA attention. No mask exists at run time except the distinct partial blocks; building the
schedule takes time in proportion to all blocks, active or not.
"""

import functools

import jax
import numpy as np

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout


class LayoutMask(splash.Mask):
    """tokamax's view of a layout: evaluated for the requested rows and columns only."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @property
    def shape(self) -> tuple[int, int]:
        """(q_len, kv_len)."""
        return self._layout.q_len, self._layout.kv_len

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, cols = (np.arange(length)[part] for length, part in zip(self.shape, index, strict=True))
        return self._layout.sees(rows[:, None], cols[None])

    # tokamax caches by mask: equality and hash must cover all that the mask depends on.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayoutMask) and self._layout == other._layout

    def __hash__(self) -> int:
        return hash((LayoutMask, self._layout))


@functools.lru_cache(maxsize=32)
def kernel(layout: Layout, config: splash.SplashConfig, given: None = None) -> splash.SplashAttentionKernel:
    """A kernel for every sequence of that layout; built once."""
    del given
    with jax.ensure_compile_time_eval():  # the cached arrays must outlive the trace that asked first
        return splash.make_splash_mqa_single_device(LayoutMask(layout), config=config)
