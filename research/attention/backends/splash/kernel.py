"""tokamax's splash attention kernels. Beside `joined/kernels.py` the only module that imports tokamax.

The kernels are at the same private path in both tested versions. This module loads its own copy of tokamax's kernel
module and changes two things in it:

* The vector memory (VMEM) that a kernel may use. tokamax has no parameter for it, and the compiler's flag applies to
  the whole program: a higher limit makes every matrix product several times slower to compile.
* The scale of the logits. tokamax's callers scale q, and for the base-2 exponential tokamax multiplies q by log2(e),
  both rounded to q's dtype: in bfloat16 the log-sum-exp was off by 0.03 (LOG.md). The copy scales the float32 logits
  instead, and is used with the natural exponential.
"""

import contextlib
import importlib.util
import inspect
import types
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32
from tokamax._src.ops.experimental.tpu.splash_attention.base import (
    DEFAULT_MASK_VALUE,
    SegmentIds,
)
from tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask import Mask
from tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask_info import MaskInfo, process_mask

__all__ = [
    "DEFAULT_MASK_VALUE",
    "Info",
    "Mask",
    "MaskInfo",
    "SegmentIds",
    "SplashAttentionKernel",
    "SplashConfig",
    "allows_rank_promotion",
    "backward",
    "logit_scale",
    "make_dynamic_splash_mqa",
    "make_splash_mqa_single_device",
    "process_mask",
    "vmem_limit",
]

_limit, _scale = jax.make_user_context(0), jax.make_user_context(1.0)  # part of the key of jax.jit's cache


def _compiler_params(**settings: Any) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(**settings, vmem_limit_bytes=_limit.value or None)


def _own_kernels() -> types.ModuleType:
    spec = importlib.util.find_spec("tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_kernel")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.pltpu = types.SimpleNamespace(**{**vars(pltpu), "CompilerParams": _compiler_params})
    masked = module._apply_mask_and_soft_cap  # of every kernel's float32 logits
    module._apply_mask_and_soft_cap = lambda logits, *args, **kwargs: masked(logits * _scale.value, *args, **kwargs)
    return module


kernels = _own_kernels()
Info = tuple  # for annotations of a `MaskInfo`: tokamax annotates its fields as NumPy arrays, but JAX arrays occur, too


def vmem_limit(kib: int) -> contextlib.AbstractContextManager:
    """A context in which traced kernels may use that much vector memory; 0 is the compiler's default."""
    return _limit(kib * 1024)


def logit_scale(scale: float) -> contextlib.AbstractContextManager:
    """A context in which traced kernels scale q . k, in float32. Their gradients of q and k lack the factor."""
    return _scale(scale)


# A decorator for callers of tokamax, which relies on rank promotion even if `jax_numpy_rank_promotion` forbids it.
allows_rank_promotion = jax.numpy_rank_promotion("allow")

# tokamax 0.0.17 prunes schedules by segments, which its backward kernel only supports with the ring buffer.
SEGMENTS_NEED_RING = hasattr(kernels, "_refine_mask_info_with_segments")

_HAS_KEY = "prng_key" in inspect.signature(kernels._splash_attention_fwd).parameters  # for dropout, from 0.0.17 on

SplashAttentionKernel = kernels.SplashAttentionKernel
SplashConfig = kernels.SplashConfig
make_dynamic_splash_mqa = allows_rank_promotion(kernels.make_dynamic_splash_mqa)
make_splash_mqa_single_device = allows_rank_promotion(kernels.make_splash_mqa_single_device)


def backward(
    kernel: SplashAttentionKernel,
    q: Float[Array, "H q_len D"],
    keys: Float[Array, "kv_len D"],
    segment_ids: SegmentIds | None,
    out: Float[Array, "H q_len D"],
    logsumexp: Float32[Array, "H q_len"],
    d_out: Float[Array, "H q_len D"],
) -> tuple[Float[Array, "H q_len D"], Float[Array, "kv_len D"], Float[Array, "kv_len D"]]:
    """The backward pass of a kernel.

    Args:
      kernel: a multi-query kernel with the natural exponential.
      q, keys, segment_ids: its inputs; keys are also the values.
      out, logsumexp: its outputs.
      d_out: the gradient of out.

    Returns:
      The gradients of q, of the keys and of the values; the first two without the factor `logit_scale`.
    """
    settings = {name: value for name, value in kernel.kwargs.items() if name != "save_residuals"}
    residuals = (q, keys, keys, segment_ids, None, out, logsumexp, kernel.dkv_mask_info, *([None] if _HAS_KEY else []))
    return kernels._splash_attention_bwd(save_residuals=False, **settings, res=residuals, grads=d_out)[2:5]
