"""`hybrid`: closed-form blocks of local keys, and of entries those that a query could reach, masked at run time.

Serves CSA. The lists of blocks are fixed before the program runs, documents arrive as segment ids as they do under
`closed_form`, and what the indexer chose costs a byte per pair of query and completed entry, q_len x compressed_len / 2
in all, where `dynamic` holds q_len x kv_len and sorts the blocks at run time. Blocks without a chosen entry are
skipped.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout
from research.attention.backends.splash.schedules import closed_form
from research.attention.backends.splash.schedules.block_schedule import EMPTY, PARTIAL, BlockSchedule


def kernel(layout: Layout, config: splash.SplashConfig, given: Bool[Array, "S C"]) -> splash.SplashAttentionKernel:
    """A kernel over one sequence's choice of entries. Never `vmap` it: see `dynamic`."""
    rows, entries = jnp.arange(layout.q_len)[:, None], jnp.arange(layout.compressed_len)[None]
    chosen = jnp.pad(given, ((0, layout.q_len - layout.seq_len), (0, layout.compressed_len - layout.entries)))
    attended = layout.visibility.sees_compressed(rows, entries) & chosen  # documents are the kernel's to compare
    plan = closed_form.schedules(layout, config)
    return closed_form.assemble(config, *(_with_choice(*part, attended) for part in plan), plan)


def _with_choice(
    schedule: BlockSchedule, dynamic_grid: bool, attended: Bool[Array, "q_len compressed_len"]
) -> splash.Info:
    info = jax.tree.map(jnp.asarray, closed_form.mask_info(schedule, dynamic_grid))
    blocks = closed_form.partial_blocks(schedule, attended)
    nothing = ~jnp.any(blocks, axis=(1, 2))[info.mask_next]
    kinds = jnp.where((info.block_mask == PARTIAL) & nothing, EMPTY, info.block_mask)
    return info._replace(block_mask=kinds.astype(info.block_mask.dtype), partial_mask_blocks=blocks)
