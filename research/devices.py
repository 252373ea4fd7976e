"""Which devices JAX is to ask for. A leaf."""

import glob
import importlib.util

import jax

from research.errors import ConfigError

# The devices' files and jax's plugins, by platform; a plugin is also what compiles ahead of time for devices elsewhere.
_FILES = {
    "tpu": ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"),
    "cuda": ("/dev/nvidia[0-9]*",),
    "rocm": ("/dev/kfd",),
}
_PLUGINS = {
    "tpu": ("libtpu",),
    "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"),
    "rocm": ("jax_rocm60_plugin", "jax_rocm7_plugin"),
}


def ignore_absent_devices() -> None:
    """Keeps jax from asking a plugin for devices that are not there; programs call it before they ask for devices.

    Plugins are installed there to compile ahead of time. Asked for devices, libtpu prints pages or waits for a metadata
    server that never answers, and CUDA's prints a traceback. Platforms that were chosen otherwise, as by JAX_PLATFORMS,
    stay.
    """
    plugins = [platform for platform, names in _PLUGINS.items() if any(map(importlib.util.find_spec, names))]
    present = [platform for platform in plugins if any(map(glob.glob, _FILES[platform]))]
    if present != plugins and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", ",".join((*present, "cpu")))


def require() -> None:
    """Asks for devices, of the platforms that JAX_PLATFORMS names or else of any that are there.

    Raises:
      ConfigError: a platform that was asked for is not there.
    """
    ignore_absent_devices()
    try:
        jax.devices()
    except Exception as error:  # RuntimeError, or of a platform without a plugin an AssertionError without a word
        said = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"JAX_PLATFORMS={jax.config.jax_platforms}: must name platforms that are here, or be unset"
            + (f" ({said})" if said else "")
        ) from error
