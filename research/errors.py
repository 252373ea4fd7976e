"""How runs fail, in words that fit a table. A leaf: nothing of `research` is imported here, and nothing heavy."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

INVALID = "invalid config"
UNSUPPORTED = "unsupported"
OUT_OF_MEMORY = "out of memory"
NAN_LOSS = "nan loss"
DISK_FULL = "disk full"
UNREACHABLE = "no access"
INTERRUPTED = "interrupted"
IN_USE = "in use"
DAMAGED = "damaged"
OTHER = "error"

_REFUSED = "EACCES EPERM EROFS ENOTDIR EIO EBUSY EMFILE ENFILE"
_OF_NETWORK = "ESTALE ETIMEDOUT ENETUNREACH EHOSTUNREACH EHOSTDOWN ENOTCONN ECONNRESET EREMOTEIO ENOLCK"
_OF_DISK = {
    errno.ENOSPC: DISK_FULL,
    errno.EDQUOT: DISK_FULL,
    errno.ENOMEM: OUT_OF_MEMORY,
    **{getattr(errno, name): UNREACHABLE for name in f"{_REFUSED} {_OF_NETWORK}".split() if hasattr(errno, name)},
}
# How the compilers of both tested stacks say it; HBM, VMEM and SMEM in turn.
_SHORTAGES = (
    r"Ran out of memory on (?P<space>HBM), .*? \((?P<needed>[\d.]+\w)\) exceeds available HBM "
    r"\((?P<available>[\d.]+\w)\)",
    r"Ran out of memory in memory space (?P<space>vmem).*Scoped allocation with size (?P<needed>[\d.]+\w) "
    r"and limit (?P<available>[\d.]+\w)",
    r"Ran out of memory in memory space (?P<space>\w+)\. Used (?P<needed>[\d.]+\w) of (?P<available>[\d.]+\w)",
)
_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class ConfigError(ValueError):
    """A setting that cannot be run; the message names the field, its value and what is allowed."""


class SettingError(ConfigError):
    """A setting whose value is not allowed.

    Attributes:
      field: dotted name, without `config.`.
      value: what it was set to.
      allowed: in words what is; they follow "must be".
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)
        self.field, self.value, self.allowed = field, value, allowed

    def __str__(self) -> str:
        return f"config.{self.field}={self.value!r}: must be {self.allowed}"


class InUseError(Exception):
    """A run's folder belongs to another process."""


class DamagedError(Exception):
    """A file is not what was written; the message names it and says what to do."""


class NonFiniteLossError(ArithmeticError):
    """The loss or its gradient became NaN or infinite."""


class InterruptedRunError(Exception):
    """A signal asked the run to stop; it goes on when it is started again."""


_KINDS = {
    ConfigError: INVALID,
    NotImplementedError: UNSUPPORTED,
    NonFiniteLossError: NAN_LOSS,
    InterruptedRunError: INTERRUPTED,
    InUseError: IN_USE,
    DamagedError: DAMAGED,
}


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
    for cls, name in _KINDS.items():
        if isinstance(error, cls):
            return name
    if isinstance(error, OSError):
        return _OF_DISK.get(error.errno, OTHER)
    text = f"{error} {error.__cause__}"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:  # XLA has no class of its own for it
        lacked = shortage(text)
        return f"out of {lacked.space}" if lacked else OUT_OF_MEMORY
    return OTHER


@contextlib.contextmanager
def disk_errors(path: str | os.PathLike) -> Iterator[None]:
    """Within it, an OSError names a file, `path` if it says no other: writing to a full disk names none.

    What tensorstore says of a file (a ValueError, also as the cause of what orbax makes of it; RESOURCE_EXHAUSTED for a
    full disk) becomes the OSError that it is.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    except Exception as error:
        text = f"{error} {error.__cause__}"
        code = re.search(r"os_error_code='(\d+)'", text)
        if code is None:
            raise
        said = re.search(r'local file "([^"]*)"', text)
        raise OSError(int(code[1]), os.strerror(int(code[1])), said[1] if said else str(path)) from error


@contextlib.contextmanager
def memory_errors(doing: str, advice: str) -> Iterator[None]:
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
