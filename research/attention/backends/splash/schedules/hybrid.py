"""`hybrid`: the blocks of `closed_form`, with blocks of entries masked at run time by the selected entries.

For CSA. The lists of blocks are known at compile time, and documents are passed as segment ids, both as with
`closed_form`. The mask of the entries takes a byte per pair of a query and a complete entry, q_len * compressed_len / 2
in all; `dynamic` takes q_len * kv_len, and sorts the blocks at run time. Blocks without a selected entry are skipped.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout
from research.attention.backends.splash.schedules import closed_form
from research.attention.backends.splash.schedules.block_schedule import EMPTY, PARTIAL, BlockSchedule


def kernel(layout: Layout, config: splash.SplashConfig, runtime: Bool[Array, "S C"]) -> splash.SplashAttentionKernel:
    """The kernel for the selected entries of one sequence. Not to be used under `jax.vmap`: see `dynamic`."""
    rows, entries = jnp.arange(layout.q_len)[:, None], jnp.arange(layout.compressed_len)[None]
    selected = jnp.pad(runtime, ((0, layout.q_len - layout.seq_len), (0, layout.compressed_len - layout.entries)))
    attended = layout.visibility.sees_compressed(rows, entries) & selected  # the kernel compares documents
    plan = closed_form.schedules(layout, config)
    return closed_form.assemble(config, *(_with_selection(*part, attended) for part in plan), plan)


def _with_selection(
    schedule: BlockSchedule, dynamic_grid: bool, attended: Bool[Array, "q_len compressed_len"]
) -> splash.Info:
    """tokamax's form of a schedule, with partial blocks that are empty at run time marked as such."""
    info = jax.tree.map(jnp.asarray, closed_form.mask_info(schedule, dynamic_grid))
    blocks = closed_form.partial_blocks(schedule, attended)
    is_empty = ~jnp.any(blocks, axis=(1, 2))[info.mask_next]
    kinds = jnp.where((info.block_mask == PARTIAL) & is_empty, EMPTY, info.block_mask)
    return info._replace(block_mask=kinds.astype(info.block_mask.dtype), partial_mask_blocks=blocks)
