"""Against numbers made bit by bit, from the formats' definitions (OCP's 8-bit and microscaling specifications)."""

import ml_dtypes
import numpy as np
import pytest

from research.errors import ConfigError
from research.importing import quantized


def e2m1(bits):
    sign, exponent, mantissa = bits >> 3, (bits >> 1) & 3, bits & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def e4m3(bits):
    sign, exponent, mantissa = bits >> 7, (bits >> 3) & 15, bits & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_fp4_has_the_even_column_in_the_low_half(dtype):
    rng = np.random.RandomState(0)
    stored, scale = rng.randint(0, 256, (6, 32), np.uint8), rng.randint(120, 135, (6, 2), np.uint8)
    expected = np.zeros((6, 64))
    for i in range(6):
        for j in range(64):
            byte = int(stored[i, j // 2])
            expected[i, j] = e2m1(byte >> 4 if j % 2 else byte & 15) * 2.0 ** (int(scale[i, j // 32]) - 127)
    found = quantized.values("w", stored.view(dtype), scale.view(ml_dtypes.float8_e8m0fnu))
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    np.testing.assert_array_equal(quantized.values("w", stored.view(dtype), scale), expected.astype(np.float32))
    assert found.shape == quantized.shape_of(np.dtype(dtype), stored.shape)


@pytest.mark.parametrize("blocks", [(2, 3), (8, 1), (1, 12)])
def test_fp8_takes_its_blocks_from_the_shapes(blocks):
    rng = np.random.RandomState(1)
    stored, scale = rng.randint(0, 256, (8, 12), np.uint8), rng.randint(100, 150, blocks, np.uint8)
    stored[(stored & 127) == 127] = 3  # NaN
    expected = np.zeros((8, 12))
    for i in range(8):
        for j in range(12):
            exponent = int(scale[i * blocks[0] // 8, j * blocks[1] // 12]) - 127
            expected[i, j] = e4m3(int(stored[i, j])) * 2.0**exponent
    found = quantized.values("w", stored.view(ml_dtypes.float8_e4m3fn), scale.view(ml_dtypes.float8_e8m0fnu))
    np.testing.assert_array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("blocks", [(3, 1), (1, 5), (0, 1), (2,)])
def test_blocks_that_do_not_fill_a_tensor_are_refused(blocks):
    with pytest.raises(ConfigError, match=r"layers\.0\.w: scales .* do not divide \[8, 12\]"):
        quantized.values("layers.0.w", np.zeros((8, 12), ml_dtypes.float8_e4m3fn), np.ones(blocks, np.float32))
