"""How runs fail, in words that fit a table."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator

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


class NonFiniteLossError(ArithmeticError):
    """The loss or its gradient became NaN or infinite."""


class InterruptedRunError(Exception):
    """A signal asked the run to stop; it goes on when it is started again."""


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
        space = re.search(r"memory space (hbm|vmem|smem)", text)
        return f"out of {space[1].upper()}" if space else OUT_OF_MEMORY
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
