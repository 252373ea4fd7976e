"""`static`: tokamax evaluates the visibility block by block on the host, before compiling (seed 001).

For sliding and HCA attention. At run time only the distinct partial blocks exist as masks. Building the schedule takes
time in proportion to the number of all blocks, active or not.
"""

import functools

import jax
import numpy as np
from jaxtyping import Bool

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout


class LayoutMask(splash.Mask):
    """A layout as tokamax's lazy mask, evaluated only for the requested rows and columns."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @property
    def shape(self) -> tuple[int, int]:
        """(q_len, kv_len)."""
        return self._layout.q_len, self._layout.kv_len

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "rows cols"]:
        rows, cols = (np.arange(length)[part] for length, part in zip(self.shape, index, strict=True))
        return self._layout.sees(rows[:, None], cols[None])

    # Keys of tokamax's caches: equality and hash must cover everything that the mask depends on.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayoutMask) and self._layout == other._layout

    def __hash__(self) -> int:
        return hash((LayoutMask, self._layout))


def kernel(layout: Layout, config: splash.SplashConfig, runtime: None = None) -> splash.SplashAttentionKernel:
    """The kernel for all sequences of a layout."""
    del runtime
    return host(layout, config)


@functools.lru_cache(maxsize=32)
def host(layout: Layout, config: splash.SplashConfig) -> splash.SplashAttentionKernel:
    """The same, cached: the schedule is built once, be it before tracing or while it goes on."""
    with jax.ensure_compile_time_eval():  # the cached arrays must outlive the first trace
        return splash.make_splash_mqa_single_device(LayoutMask(layout), config=config)
