import json

import ml_dtypes
import numpy as np
import pytest

from research.errors import ConfigError, DamagedError
from research.importing import safetensors
from research.importing.safetensors import Outgoing


def written(folder, **arrays):
    folder.mkdir(exist_ok=True)
    file = folder / "model.safetensors"
    safetensors.write(file, {n: Outgoing(a.shape, a.dtype, lambda a=a: a) for n, a in arrays.items()})
    return file


@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, np.int64, np.int8]
)
def test_what_is_written_is_read(tmp_path, dtype):
    arrays = {
        "a": np.arange(1, 7).reshape(2, 3).astype(dtype),
        "empty": np.zeros((0, 4), dtype),
        "b": np.ones((), dtype),
    }
    written(tmp_path / "x", **arrays)
    found = safetensors.tensors(tmp_path / "x")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        read = found[name].read()
        assert (read.dtype, read.shape) == (array.dtype, array.shape)
        assert read.tobytes() == array.tobytes()


def test_the_library_reads_what_is_written(tmp_path):
    library = pytest.importorskip("safetensors.numpy", reason="comes with requirements-parity.txt")
    array = np.random.RandomState(0).standard_normal((3, 5)).astype(np.float32)
    file = written(tmp_path / "x", a=array, b=np.arange(4))
    read = library.load_file(file)
    np.testing.assert_array_equal(read["a"], array)
    np.testing.assert_array_equal(read["b"], np.arange(4))


def test_a_folder_without_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors"):
        safetensors.tensors(tmp_path)


def test_a_file_of_the_index_that_is_absent_is_named(tmp_path):
    written(tmp_path, a=np.ones(3))
    (tmp_path / safetensors.INDEX).write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "2.safetensors"}})
    )
    with pytest.raises(ConfigError, match=r"lacks 2\.safetensors"):
        safetensors.tensors(tmp_path)


def test_a_tensor_of_two_files_is_named(tmp_path):
    file = written(tmp_path, a=np.ones(3))
    (tmp_path / "other.safetensors").write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"has a, which model\.safetensors has, too"):
        safetensors.tensors(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_a_file_cut_short_is_named(tmp_path, kept):
    file = written(tmp_path, a=np.ones(3))
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(DamagedError, match=r"model\.safetensors: is .*cut short"):
        safetensors.tensors(tmp_path)


def test_a_dtype_that_is_not_read_is_named(tmp_path):
    file = written(tmp_path, a=np.ones(3))
    file.write_bytes(file.read_bytes().replace(b'"F64"', b'"C64"'))
    with pytest.raises(ConfigError, match=r"a is C64; must be one of"):
        safetensors.tensors(tmp_path)


def test_a_failed_write_leaves_no_file(tmp_path):
    def fail():
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        safetensors.write(tmp_path / "a.safetensors", {"a": Outgoing((1,), np.dtype(np.float32), fail)})
    assert not (tmp_path / "a.safetensors").exists()
