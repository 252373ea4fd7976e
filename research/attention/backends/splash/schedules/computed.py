"""`computed`: partial blocks are masked inside the kernel from their indices; no mask exists in memory.

Serves sliding and HCA attention. The list of blocks is that of `closed_form`.
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
    """`layout.sees` with equality and hash: the kernel is compiled once per mask function."""

    layout: Layout

    def __call__(self, rows: Any, cols: Any) -> Any:
        return self.layout.sees(rows, cols)


def kernel(layout: Layout, config: splash.SplashConfig, given: None = None) -> splash.SplashAttentionKernel:
    """A kernel for every sequence of that layout; its schedule is built once."""
    del given
    rows = np.arange(layout.q_len, dtype=np.int32)
    plan = closed_form.schedules(layout, config)
    infos = [closed_form.mask_info(*part)._replace(mask_next=None, q_sequence=rows) for part in plan]
    infos = [jax.tree.map(jnp.asarray, info) for info in infos]
    return closed_form.assemble(config, *infos, plan, mask_function=_Sees(layout))
