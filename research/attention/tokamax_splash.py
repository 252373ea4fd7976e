"""The one place that imports tokamax: the splash kernels live at the same private path in both tested versions."""

import jax
from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernels
from tokamax._src.ops.experimental.tpu.splash_attention.base import (
    DEFAULT_MASK_VALUE,
    SegmentIds,
)
from tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask import Mask
from tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask_info import MaskInfo, process_mask

__all__ = [
    "DEFAULT_MASK_VALUE",
    "Mask",
    "MaskInfo",
    "SegmentIds",
    "SplashAttentionKernel",
    "SplashConfig",
    "allows_rank_promotion",
    "make_dynamic_splash_mqa",
    "make_splash_mqa_single_device",
    "process_mask",
]

# Decorates what runs tokamax's code, which mixes ranks even where `jax_numpy_rank_promotion` forbids it to ours.
allows_rank_promotion = jax.numpy_rank_promotion("allow")

# tokamax 0.0.17 prunes every schedule by the segments, for which its backward kernel knows the ring buffer alone.
SEGMENTS_NEED_RING = hasattr(kernels, "_refine_mask_info_with_segments")

SplashAttentionKernel = kernels.SplashAttentionKernel
SplashConfig = kernels.SplashConfig
make_dynamic_splash_mqa = allows_rank_promotion(kernels.make_dynamic_splash_mqa)
make_splash_mqa_single_device = allows_rank_promotion(kernels.make_splash_mqa_single_device)
