"""Foreseen errors are told apart, and told in a line."""

import errno

import jax
import pytest

from research import errors
from research.errors import ConfigError


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("x"), "invalid config"),
        (NotImplementedError("x"), "unsupported"),
        (errors.NonFiniteLossError("x"), "nan loss"),
        (MemoryError(), "out of memory"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating"), "out of memory"),
        (jax.errors.JaxRuntimeError("INTERNAL: x"), "error"),
        (OSError(errno.ENOSPC, "x"), "disk full"),
        (PermissionError(errno.EACCES, "x"), "no access"),
        (FileNotFoundError(errno.ENOENT, "x"), "error"),
        (errors.InterruptedRunError("x"), "interrupted"),
        (ValueError("x"), "error"),
    ],
)
def test_kinds_of_errors(error, kind):
    assert errors.kind(error) == kind


FULL = (
    'RESOURCE_EXHAUSTED: Error writing "a/0" in OCDBT database at local file "/runs/5/": Failed writing: "/runs/5/d": '
    "Failed to write 197608 bytes to file 4: No space left on device [os_error_code='28']"
)


def test_full_disk_is_not_taken_for_memory():
    with (
        pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device: '/runs/5/'$") as raised,
        errors.disk_errors("/runs"),
    ):
        raise ValueError(FULL)
    assert errors.kind(raised.value) == "disk full"
    with pytest.raises(ValueError, match=r"^shape$"), errors.disk_errors("/runs"):
        raise ValueError("shape")
    with pytest.raises(OSError, match=r"^\[Errno 28\] full: '/runs'$"), errors.disk_errors("/runs"):
        raise OSError(errno.ENOSPC, "full")


def test_out_of_memory_says_what_was_done_and_which_memory():
    text = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 120G of 95G.\nA page of allocations"
    with pytest.raises(MemoryError) as raised, errors.memory_errors("compiling the step", "too much with x=1"):
        raise jax.errors.JaxRuntimeError(text)
    assert str(raised.value) == (
        "compiling the step: out of memory in memory space hbm. Used 120G of 95G; too much with x=1"
    )
    assert errors.kind(raised.value) == "out of HBM"
    with pytest.raises(ValueError, match=r"^shape$"), errors.memory_errors("compiling the step", "x"):
        raise ValueError("shape")
