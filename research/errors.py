"""How runs fail, in words that fit a table."""

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
    """The status under which a run that raised `error` is recorded."""
    if isinstance(error, ConfigError):
        return INVALID
    if isinstance(error, NotImplementedError):
        return UNSUPPORTED
    if isinstance(error, NonFiniteLossError):
        return NAN_LOSS
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):  # XLA has no class of its own for it
        return OUT_OF_MEMORY
    return OTHER
