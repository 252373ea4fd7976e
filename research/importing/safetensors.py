"""Reads and writes folders of safetensors files, one tensor at a time.

The format: eight bytes, the length of a JSON header; the header, which gives each tensor's dtype, shape and place; the
tensors, row by row (https://github.com/huggingface/safetensors). Files are mapped into memory, so that only what is
read of a tensor takes any. The library of that name reads no bfloat16, FP8 or FP4 as NumPy arrays (0.8.0).
"""

import json
import math
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from research import errors
from research.errors import ConfigError, DamagedError

INDEX = "model.safetensors.index.json"
_LENGTH = 8  # bytes, of the header's length
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


class Tensor(NamedTuple):
    """Where a tensor is: its file, the byte it starts at, and what it is."""

    file: pathlib.Path
    start: int
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """The tensor, mapped into memory and not to be written to."""
        count = math.prod(self.shape)
        if not count:
            return np.zeros(self.shape, self.dtype)
        with errors.disk_errors(self.file):
            raw = np.memmap(self.file, np.uint8, "r", self.start, (count * self.dtype.itemsize,))
        return np.asarray(raw).view(self.dtype).reshape(self.shape)


def tensors(folder: pathlib.Path) -> dict[str, Tensor]:
    """What is in the safetensors files of a folder, by name.

    Raises:
      ConfigError: there are none, the folder's index names one that is absent, or two have a tensor of one name.
      DamagedError: a file is cut short, or is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: holds no *.safetensors")
    if (folder / INDEX).is_file():
        listed = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        if absent := sorted(listed - {file.name for file in files}):
            raise ConfigError(f"{folder}: lacks {', '.join(absent)}, of its {INDEX}")
    found: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _header(file).items():
            if name in found:
                raise ConfigError(f"{file}: has {name}, which {found[name].file.name} has, too")
            found[name] = tensor
    return found


def _header(file: pathlib.Path) -> dict[str, Tensor]:
    size = file.stat().st_size
    with errors.disk_errors(file), file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH), "little")
        content = opened.read(length) if length < size else b""
    try:
        header = json.loads(content)
    except ValueError as error:
        raise DamagedError(f"{file}: is no safetensors file, or cut short; get it again") from error
    begin, found = _LENGTH + length, {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ConfigError(f"{file}: {name} is {entry['dtype']}; must be one of {', '.join(_DTYPES)}")
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
        start, end = entry["data_offsets"]
        if end - start != math.prod(shape) * dtype.itemsize or begin + end > size:
            raise DamagedError(f"{file}: is cut short, or its header wrong, at {name}; get it again")
        found[name] = Tensor(file, begin + start, dtype, shape)
    return found


class Outgoing(NamedTuple):
    """A tensor to be written: its shape and dtype, and what makes it when it is its turn."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(file: pathlib.Path, outgoing: dict[str, Outgoing]) -> None:
    """Writes a file of tensors; whole or, if killed, not under that name.

    Raises:
      OSError: it cannot be written.
    """
    header, place = {"__metadata__": {"format": "pt"}}, 0  # without which transformers refuses a file
    for name, tensor in outgoing.items():
        end = place + tensor.bytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % _LENGTH)  # tensors start at a multiple of it
    beside = file.with_name(file.name + ".new")
    with errors.disk_errors(file):
        with beside.open("wb") as opened:
            opened.write(len(content).to_bytes(_LENGTH, "little") + content)
            for tensor in outgoing.values():
                opened.write(tensor.make().tobytes())
        beside.replace(file)
