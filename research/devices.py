"""Which devices JAX is to ask for. A leaf."""

import glob
import importlib.util

import jax

from research.errors import ConfigError


def ignore_absent_tpu() -> None:
    """Keeps jax from asking libtpu for devices where there is no TPU; programs call it before they ask for devices.

    libtpu is installed there to compile ahead of time. Asked for devices it prints pages, or waits for a metadata
    server that never answers. Platforms that were chosen otherwise, as by JAX_PLATFORMS, stay.
    """
    present = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    if present or importlib.util.find_spec("libtpu") is None:
        return
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", ",".join((*_gpus(), "cpu")))


def require() -> None:
    """Asks for devices, of the platforms that JAX_PLATFORMS names or else of any that are there.

    Raises:
      ConfigError: a platform that was asked for is not there.
    """
    ignore_absent_tpu()
    try:
        jax.devices()
    except Exception as error:  # RuntimeError, or of a platform without a plugin an AssertionError without a word
        said = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"JAX_PLATFORMS={jax.config.jax_platforms}: must name platforms that are here, or be unset"
            + (f" ({said})" if said else "")
        ) from error


def _gpus() -> list[str]:
    """The platforms of GPUs that are there and that jax has a plugin for."""
    plugins = {
        "cuda": ("/dev/nvidia[0-9]*", ("jax_cuda12_plugin", "jax_cuda13_plugin")),
        "rocm": ("/dev/kfd", ("jax_rocm60_plugin", "jax_rocm7_plugin")),
    }
    return [
        platform
        for platform, (devices, names) in plugins.items()
        if glob.glob(devices) and any(importlib.util.find_spec(name) for name in names)
    ]
