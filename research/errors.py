"""How runs fail, in words that fit a table."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from research.config import ConfigError

INVALID, UNSUPPORTED, OUT_OF_MEMORY, NAN_LOSS, DISK_FULL, UNREACHABLE, INTERRUPTED, OTHER = (
    "invalid config",
    "unsupported",
    "out of memory",
    "nan loss",
    "disk full",
    "no access",
    "interrupted",
    "error",
)
_OF_DISK = {errno.ENOSPC: DISK_FULL, errno.EDQUOT: DISK_FULL} | dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EIO), UNREACHABLE
)
# How the compilers of both tested stacks say it; HBM, VMEM and SMEM in turn.
_SHORTAGES = (
    r"Ran out of memory on (?P<space>HBM), .*? \((?P<needed>[\d.]+\w)\) exceeds available HBM "
    r"\((?P<available>[\d.]+\w)\)",
    r"Ran out of memory in memory space (?P<space>vmem).*Scoped allocation with size (?P<needed>[\d.]+\w) "
    r"and limit (?P<available>[\d.]+\w)",
    r"Ran out of memory in memory space (?P<space>\w+)\. Used (?P<needed>[\d.]+\w) of (?P<available>[\d.]+\w)",
)
_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class NonFiniteLossError(ArithmeticError):
    """The loss or its gradient became NaN or infinite."""


class InterruptedRunError(Exception):
    """A signal asked the run to stop; it goes on when it is started again."""


class Shortage(NamedTuple):
    """A memory that ran out: its name, HBM, VMEM or SMEM, and bytes as rounded as the compiler prints them."""

    space: str
    needed_bytes: int
    available_bytes: int


def shortage(message: str) -> Shortage | None:
    """Which memory a TPU's compiler lacked and how much of it, None if the message is of something else."""
    for pattern in _SHORTAGES:
        if found := re.search(pattern, message, re.DOTALL):
            return Shortage(found["space"].upper(), _bytes(found["needed"]), _bytes(found["available"]))
    return None


def kind(error: Exception) -> str:
    """The status under which a run that raised `error` is recorded; a TPU's compiler says which memory ran out."""
    if isinstance(error, ConfigError):
        return INVALID
    if isinstance(error, NotImplementedError):
        return UNSUPPORTED
    if isinstance(error, NonFiniteLossError):
        return NAN_LOSS
    if isinstance(error, InterruptedRunError):
        return INTERRUPTED
    if isinstance(error, OSError):
        return _OF_DISK.get(error.errno, OTHER)
    text = f"{error} {error.__cause__}"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:  # XLA has no class of its own for it
        lacked = shortage(text)
        return f"out of {lacked.space}" if lacked else OUT_OF_MEMORY
    return OTHER


@contextlib.contextmanager
def of_disk(path: str | os.PathLike) -> Iterator[None]:
    """Within it, an OSError names a file, `path` if it says no other: writing to a full disk names none.

    What tensorstore says of a file (a ValueError; RESOURCE_EXHAUSTED for a full disk) becomes the OSError that it is.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        said = re.search(r'local file "([^"]*)"', str(error))
        raise OSError(int(code[1]), os.strerror(int(code[1])), said[1] if said else str(path)) from error


@contextlib.contextmanager
def of_memory(doing: str, advice: str) -> Iterator[None]:
    """Within it, running out of memory is a MemoryError of one line: what was being done, and what may help."""
    try:
        yield
    except Exception as error:
        if not kind(error).startswith("out of"):
            raise
        asked = re.search(r"[Oo]ut of memory[^\n]{0,120}", str(error))
        said = f": {asked[0].rstrip('.')}" if asked else ""
        raise MemoryError(f"{doing}{said}; {advice}") from error


def _bytes(text: str) -> int:
    return round(float(text[:-1]) * _UNITS[text[-1]])
