"""Several processes that succeed together or fail together, so that none waits for one that has failed."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from research import errors

Result = TypeVar("Result")

_LONGEST = 2000  # bytes of a message that travel


class OtherProcessError(Exception):
    """Another process failed; the message is its own."""


def together(action: Callable[[], Result]) -> Result:
    """What `action` returns here, once it has returned in all processes, which must all call this.

    Raises:
      What `action` raises here, if it does; where it raised elsewhere alone, a refusal (`ConfigError`, `InUseError`,
      `DamagedError`) as itself, anything else as `OtherProcessError`.
    """
    if jax.process_count() == 1:
        return action()
    failure, result = None, None
    try:
        result = action()
    except Exception as error:  # raised below, when the others know
        failure = error
    kind = "" if failure is None else errors.kind(failure)
    text = "" if failure is None else f"{kind}\n{failure}"
    told = exchange(text)
    if failure is not None:
        raise failure
    for process, other in enumerate(told):
        if other:
            kind, _, message = other.partition("\n")
            refusals = {errors.INVALID: errors.ConfigError, errors.IN_USE: errors.InUseError}
            refusals[errors.DAMAGED] = errors.DamagedError
            raise refusals.get(kind, OtherProcessError)(f"process {process}: {message}")
    return result


def exchange(text: str) -> list[str]:
    """The texts of all processes, in their order, cut at 2,000 bytes."""
    if jax.process_count() == 1:
        return [text]
    content = np.zeros(_LONGEST, np.uint8)
    encoded = text.encode()[:_LONGEST]
    content[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(content))
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in gathered]
