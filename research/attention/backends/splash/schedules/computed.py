"""`computed`: the kernel computes the mask of partial blocks from their indices. No mask is stored in memory.

For sliding and HCA attention. The blocks are those of `closed_form`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout
from research.attention.backends.splash.schedules import closed_form


@dataclasses.dataclass(frozen=True)
class _Sees:
    """`layout.sees` with equality and hash: tokamax compiles a kernel per mask function."""

    layout: Layout

    def __call__(self, rows: Any, cols: Any) -> Any:
        return self.layout.sees(rows, cols)


def kernel(layout: Layout, config: splash.SplashConfig, runtime: None = None) -> splash.SplashAttentionKernel:
    """The kernel for all sequences of a layout. Its schedule is cached."""
    del runtime
    rows = np.arange(layout.q_len, dtype=np.int32)
    plan = closed_form.schedules(layout, config)
    infos = [closed_form.mask_info(*part)._replace(mask_next=None, q_sequence=rows) for part in plan]
    infos = [jax.tree.map(jnp.asarray, info) for info in infos]
    return closed_form.assemble(config, *infos, plan, mask_function=_Sees(layout))
