"""How runs fail, in words that fit a table."""

import re

from research.config import ConfigError

INVALID, UNSUPPORTED, OUT_OF_MEMORY, NAN_LOSS, OTHER = (
    "invalid config",
    "unsupported",
    "out of memory",
    "nan loss",
    "error",
)


class NonFiniteLossError(ArithmeticError):
    """The loss became NaN or infinite."""


def kind(error: Exception) -> str:
    """The status under which a run that raised `error` is recorded; a TPU's compiler says which memory ran out."""
    if isinstance(error, ConfigError):
        return INVALID
    if isinstance(error, NotImplementedError):
        return UNSUPPORTED
    if isinstance(error, NonFiniteLossError):
        return NAN_LOSS
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):  # XLA has no class of its own for it
        space = re.search(r"memory space (hbm|vmem|smem)", str(error))
        return f"out of {space[1].upper()}" if space else OUT_OF_MEMORY
    return OTHER
