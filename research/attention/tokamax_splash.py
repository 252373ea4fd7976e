"""The one place that imports tokamax: the splash kernels live at the same private path in both tested versions."""

from tokamax._src.ops.experimental.tpu.splash_attention.base import SegmentIds
from tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_kernel import (
    SplashAttentionKernel,
    SplashConfig,
    make_dynamic_splash_mqa,
    make_splash_mqa_single_device,
)
from tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask import Mask

__all__ = [
    "Mask",
    "SegmentIds",
    "SplashAttentionKernel",
    "SplashConfig",
    "make_dynamic_splash_mqa",
    "make_splash_mqa_single_device",
]
