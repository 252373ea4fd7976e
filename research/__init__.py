"""Training-time DeepSeek-V4 attention: masks, schedules, backends, and the models and measurements around them."""

import glob
import importlib.util


def _ignore_absent_tpu() -> None:
    """Keeps jax from asking libtpu for devices where there is no TPU.

    libtpu is installed there to compile ahead of time. Asked for devices it prints pages, or waits for a metadata
    server that never answers.
    """
    present = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    if present or importlib.util.find_spec("libtpu") is None:
        return
    import jax  # here, for what needs no jax is not to wait for it

    if jax.config.jax_platforms:
        return
    cuda = glob.glob("/dev/nvidia[0-9]*") and any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
    jax.config.update("jax_platforms", "cuda,cpu" if cuda else "cpu")


_ignore_absent_tpu()
