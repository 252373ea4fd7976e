"""`dynamic`: the kernel's schedule is computed at run time from a mask (seeds 000 and 003).

For any visibility. Costs the mask's bytes in HBM, an int32 per block in SMEM, and a sort of all blocks.
"""

from jaxtyping import Array, Bool

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout


def kernel(
    layout: Layout, config: splash.SplashConfig, runtime: Bool[Array, "q_len kv_len"]
) -> splash.SplashAttentionKernel:
    """The kernel for the mask of one sequence. Under `jax.vmap` it takes ten times as long to compile."""
    del layout
    return splash.make_dynamic_splash_mqa(runtime, config=config)
