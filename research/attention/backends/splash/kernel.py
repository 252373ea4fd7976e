"""The one place that imports tokamax: the splash kernels live at the same private path in both tested versions.

tokamax does not let its caller say how much vector memory (VMEM) a kernel may take, and the compiler's flag for it is
for the whole program: with it raised, every product of matrices takes several times as long to compile. So we load an
instance of tokamax's module of our own, and add the limit there, where it touches nobody else.

Nor does it scale logits: its callers scale q, and for the base-2 exponential it multiplies q by log2(e) again, both
rounded to q's dtype. In bfloat16 the log-sum-exp was off by 0.03 (LOG.md). Our instance scales the logits themselves,
which are float32, and takes the natural exponential: q arrives as it is.
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

_limit, _scale = jax.make_user_context(0), jax.make_user_context(1.0)  # contexts that jax.jit's caches know of


def _compiler_params(**settings: Any) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(**settings, vmem_limit_bytes=_limit.value or None)


def _own_kernels() -> types.ModuleType:
    spec = importlib.util.find_spec("tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_kernel")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.pltpu = types.SimpleNamespace(**{**vars(pltpu), "CompilerParams": _compiler_params})
    masked = module._apply_mask_and_soft_cap  # what every kernel makes of its product, in float32, before the softmax
    module._apply_mask_and_soft_cap = lambda logits, *args, **kwargs: masked(logits * _scale.value, *args, **kwargs)
    return module


kernels = _own_kernels()
Info = tuple  # a `MaskInfo`, whose own annotations know no JAX arrays


def vmem_limit(kib: int) -> contextlib.AbstractContextManager:
    """Within it, kernels that are traced may take that much vector memory; 0 is the compiler's default."""
    return _limit(kib * 1024)


def logit_scale(scale: float) -> contextlib.AbstractContextManager:
    """Within it, kernels that are traced multiply q . k by it, in float32; their gradients of q and k lack it."""
    return _scale(scale)


# Decorates what runs tokamax's code, which mixes ranks even where `jax_numpy_rank_promotion` forbids it to ours.
allows_rank_promotion = jax.numpy_rank_promotion("allow")

# tokamax 0.0.17 prunes every schedule by the segments, for which its backward kernel knows the ring buffer alone.
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
    ids: SegmentIds | None,
    out: Float[Array, "H q_len D"],
    logsumexp: Float32[Array, "H q_len"],
    d_out: Float[Array, "H q_len D"],
) -> tuple[Float[Array, "H q_len D"], Float[Array, "kv_len D"], Float[Array, "kv_len D"]]:
    """The kernel's own backward pass, apart from its forward one.

    Args:
      kernel: a shared-key kernel of the natural exponential.
      q, keys, ids: what it was called with, keys as keys and values.
      out, logsumexp: what it gave.
      d_out: the gradient of out.

    Returns:
      The gradients of q, and of keys as keys and as values; the first two without the factor `logit_scale`.
    """
    settings = {name: value for name, value in kernel.kwargs.items() if name != "save_residuals"}
    residuals = (q, keys, keys, ids, None, out, logsumexp, kernel.dkv_mask_info, *([None] if _HAS_KEY else []))
    return kernels._splash_attention_bwd(save_residuals=False, **settings, res=residuals, grads=d_out)[2:5]
