"""Numbers of eight and of four bits with a scale per block, as DeepSeek-V4's published weights have them, in float32.

FP8 is E4M3, one number a byte. FP4 is E2M1, two a byte, that of the even column in the low half. A block's scale is a
power of two (E8M0). Blocks are as large as the two shapes say: 128 x 128 in the published FP8, 1 x 32 in FP4. Source:
Hugging Face transformers 5.24 (`integrations/finegrained_fp8.py`), DeepSeek's `inference/convert.py`.
"""

import ml_dtypes
import numpy as np

from research.errors import ConfigError

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_E2M1, -_E2M1])


def is_packed(dtype: np.dtype) -> bool:
    """Whether a quantised tensor of this dtype has two numbers a byte."""
    return dtype in (np.int8, np.uint8)


def shape_of(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the numbers in a quantised tensor of that dtype and shape."""
    return (*shape[:-1], 2 * shape[-1]) if is_packed(dtype) else shape


def values(name: str, stored: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The numbers, float32, of `shape_of`.

    Args:
      name: of the tensor, for errors.
      stored: FP8 or packed FP4, [out, in] or [out, in / 2].
      scale: of each block.

    Raises:
      ConfigError: the blocks do not fill the tensor.
    """
    numbers = _unpacked(stored) if is_packed(stored.dtype) else stored.astype(np.float32)
    if scale.ndim != numbers.ndim or any(
        not blocks or size % blocks for size, blocks in zip(numbers.shape, scale.shape, strict=True)
    ):
        raise ConfigError(f"{name}: scales {list(scale.shape)} do not divide {list(numbers.shape)} into blocks")
    if scale.dtype == np.uint8:
        scale = scale.view(ml_dtypes.float8_e8m0fnu)
    factor = scale.astype(np.float32)
    for axis, (size, blocks) in enumerate(zip(numbers.shape, factor.shape, strict=True)):
        factor = np.repeat(factor, size // blocks, axis)
    return numbers * factor


def _unpacked(stored: np.ndarray) -> np.ndarray:
    raw = stored.view(np.uint8)
    pairs = np.stack([raw & 0xF, raw >> 4], axis=-1)
    return _FP4[pairs].reshape(shape_of(stored.dtype, stored.shape))
