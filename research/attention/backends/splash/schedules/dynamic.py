"""`dynamic`: the kernel follows a boolean [q_len, kv_len] that exists at run time (seeds 000 and 003).

Serves any visibility. Costs the mask's bytes in HBM, one int32 per block in SMEM, and a sort of all blocks.
"""

from jaxtyping import Array, Bool

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout


def kernel(
    layout: Layout, config: splash.SplashConfig, given: Bool[Array, "q_len kv_len"]
) -> splash.SplashAttentionKernel:
    """A kernel over one sequence's mask. Never `vmap` it: compiling takes ten times as long."""
    del layout
    return splash.make_dynamic_splash_mqa(given, config=config)
