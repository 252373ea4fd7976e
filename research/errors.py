"""How runs fail, in words that fit a table."""

import re
from typing import NamedTuple

from research.config import ConfigError

INVALID, UNSUPPORTED, OUT_OF_MEMORY, NAN_LOSS, OTHER = (
    "invalid config",
    "unsupported",
    "out of memory",
    "nan loss",
    "error",
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
    """The loss became NaN or infinite."""


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
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):  # XLA has no class of its own for it
        lacked = shortage(str(error))
        return f"out of {lacked.space}" if lacked else OUT_OF_MEMORY
    return OTHER


def _bytes(text: str) -> int:
    return round(float(text[:-1]) * _UNITS[text[-1]])
