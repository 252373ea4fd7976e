"""tokamax's flash attention kernels for GPUs. Beside `splash/kernel.py` the only module that imports tokamax.

Read in tokamax 0.0.12 and 0.0.17. Private are the classes of the kernels and of their backward passes, their results
(`return_residuals`: without these two parts cannot share a softmax, and tokamax's own gradient drops them) and the mask
as ranges of keys. `tests/attention/backends/joined/test_kernels.py` says what has moved, if something does.

Triton's kernels are interpreted where there is no GPU, by own copies of tokamax's modules: it has no such switch, and
asks for a program's number inside a branch, which the interpreter does not allow.
"""

import contextlib
import importlib.util
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jax.experimental import pallas as pl
from tokamax._src import config as tokamax_config
from tokamax._src.ops.attention import base, pallas_mosaic_gpu
from tokamax._src.pallas import block

from research.attention.backends.joined.parts import NOTHING, Gradients, Joint, Part, Ranges, Softmax
from research.attention.padding import pad, round_up

NAMES = ("mosaic", "triton")

_interpreted = jax.make_user_context(False)  # part of the key of jax.jit's cache
_TILE = 64
_LEAST = 16  # rows of a product on the tensor cores
_WIDE = 512  # bytes of a head's row in one operand, beyond which only small tiles fit the shared memory


def _pallas_call(kernel: Any, *args: Any, **settings: Any) -> Any:
    if not _interpreted.value:
        return pl.pallas_call(kernel, *args, **settings)
    settings.pop("compiler_params", None)

    def with_ids(*refs: Any) -> Any:
        ids = [pl.program_id(axis) for axis in range(len(settings["grid_spec"].grid))]

        def program_id(axis: int) -> Any:
            if axis >= len(ids):
                raise ValueError(f"axis {axis}: beyond the grid's {len(ids)}")  # tokamax looks for the last one
            return ids[axis]

        with _replaced(_block, program_id=program_id), _replaced(_backward_module, program_id=program_id):
            return kernel(*refs)

    return pl.pallas_call(with_ids, *args, **settings, interpret=True)


class _Pallas:
    """Pallas with some functions replaced."""

    def __init__(self, **functions: Callable) -> None:
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(pl, name)


@contextlib.contextmanager
def _replaced(module: types.ModuleType, **functions: Callable) -> Iterator[None]:
    """Within it, these functions are the module's Pallas's."""
    before = module.pl
    module.pl = _Pallas(**functions)
    try:
        yield
    finally:
        module.pl = before


def _own(name: str, **replaced: Any) -> types.ModuleType:
    """A copy of tokamax's module with some of what it imports replaced."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for attribute, value in replaced.items():
        setattr(module, attribute, value)
    return module


_block = _own(block.__name__, pl=_Pallas(pallas_call=_pallas_call))
_backward_module = _own("tokamax._src.ops.attention.pallas_triton_vjp", block=_block)
_forward_module = _own("tokamax._src.ops.attention.pallas_triton", block=_block)


def forward(name: str, part: Part, *, interpreted: bool) -> Softmax:
    """Attends, by the kernel of that name."""
    num_queries, part = part.q.shape[1], _whole_tiles(part)
    op, keys = _op(name, part), part.keys[:, :, None]
    with _traced(interpreted):
        out, (row_max, row_sum) = op(
            part.q,
            keys,
            keys,
            precision=_precision(part),
            logits_dtype=jnp.dtype(jnp.float32),
            mask=_mask(part),
            return_residuals=True,
        )
    seen = (row_sum > 0) & (row_max > NOTHING)
    logsumexp = jnp.where(seen, row_max + jnp.log(jnp.where(seen, row_sum, 1.0)), NOTHING)
    logsumexp = logsumexp.swapaxes(1, 2)[:, :num_queries]
    return Softmax(jnp.where(logsumexp[..., None] > NOTHING, out[:, :num_queries], 0), logsumexp)


def backward(name: str, part: Part, joint: Joint, *, interpreted: bool) -> Gradients:
    """The gradients, by the kernel of that name."""
    (_, num_queries, *_), num_keys = part.q.shape, part.keys.shape[1]
    part = _whole_tiles(part)
    after = part.q.shape[1] - num_queries
    joint = Joint(*(pad(x, 1, 0, after, value) for x, value in zip(joint, (0, -NOTHING, 0), strict=True)))
    op, keys = _op(name, part), part.keys[:, :, None]
    logsumexp = joint.logsumexp.swapaxes(1, 2)
    with _traced(interpreted):
        found = op.vjp(
            (logsumexp, jnp.ones_like(logsumexp)),
            joint.out,
            joint.d_out,
            part.q,
            keys,
            keys,
            precision=_precision(part),
            logits_dtype=jnp.dtype(jnp.float32),
            logits_scale=part.q.shape[-1] ** -0.5,
            mask=_mask(part),
            bias=None,
            logits_soft_cap=None,
            dropout_mask=None,
            dropout_rate=0.0,
            paging_info=None,
            q_indices=None,
            k_indices=None,
            normalize_output=True,
        )
    d_keys = (found["k"].astype(jnp.float32) + found["v"].astype(jnp.float32))[:, :num_keys, 0]
    return Gradients(found["q"][:, :num_queries].astype(jnp.float32), d_keys)


@contextlib.contextmanager
def _traced(interpreted: bool) -> Iterator[None]:
    """tokamax asks for the device that is here unless told that programs are for another.

    It would also parse the command line for its own flags, where no launcher has: of notebooks and tests.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    with _interpreted(interpreted), tokamax_config.cross_compile(True), jax.numpy_rank_promotion("allow"):
        yield


def _whole_tiles(part: Part) -> Part:
    """Padded to whole tiles, which kernels need not mask: with queries that see nothing, and keys that are not seen."""
    queries, keys = (round_up(size, _tile(size)) - size for size in (part.q.shape[1], part.keys.shape[1]))
    padded = jax.tree.map(lambda x: pad(x, 1, 0, queries), part.seen)
    seen = padded if isinstance(padded, Ranges) else pad(padded, 2, 0, keys)
    return Part(pad(part.q, 1, 0, queries), pad(part.keys, 1, 0, keys), seen)


def _tile(size: int) -> int:
    """A power of two that tiles divide."""
    return max(min(_TILE, pl.next_power_of_2(size)), _LEAST)


def _op(name: str, part: Part) -> Any:
    """The op, of Triton with tiles that fit the shared memory; of Mosaic tokamax chooses them."""
    if name == "mosaic":
        return pallas_mosaic_gpu.PallasMosaicGpuFlashAttention()
    wide = part.q.shape[-1] * part.q.dtype.itemsize >= _WIDE
    most, stages = (_TILE // 2, 1) if wide else (_TILE, 2)
    queries, keys = (min(most, _tile(size)) for size in (part.q.shape[1], part.keys.shape[1]))
    forward_tiles = _forward_module.Config(block_q=queries, block_k=keys, num_stages=stages, num_warps=4)
    backward_tiles = _backward_module.Config(
        block_m1=min(queries, _TILE // 2),
        block_n1=keys,
        block_m2=queries,
        block_n2=min(keys, _TILE // 2),
        num_stages=stages,
        num_warps=4,
    )
    backward_op = _backward_module.PallasTritonFlashAttentionVjp(config=backward_tiles)
    return _forward_module.PallasTritonFlashAttention(config=forward_tiles, vjp=backward_op)


def _mask(part: Part) -> base.Mask:
    if isinstance(part.seen, Ranges):
        return base.Mask(k_start=part.seen.first[:, None], k_end=part.seen.end[:, None])
    return base.Mask(part.seen[:, None])


def _precision(part: Part) -> tuple[jax.lax.DotAlgorithmPreset, jax.lax.DotAlgorithmPreset]:
    """As `research.attention.product.precision`."""
    presets = jax.lax.DotAlgorithmPreset
    return (presets.F32_F32_F32 if part.q.dtype == jnp.float32 else presets.DEFAULT,) * 2
