"""`captured`: the whole mask is a NumPy array in the program (the slow baseline of seeds 000 and 001).

For sliding and HCA attention. The program contains q_len * kv_len booleans, and the compiler folds what the kernel's
wrapper computes from them.
"""

import jax.numpy as jnp
import numpy as np

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout
from research.hardware import LANES


def kernel(layout: Layout, config: splash.SplashConfig, runtime: None = None) -> splash.SplashAttentionKernel:
    """The kernel for all sequences of a layout."""
    del runtime
    rows, cols = np.arange(layout.q_len, dtype=np.int32)[:, None], np.arange(layout.kv_len, dtype=np.int32)[None]
    # Evaluated in groups of rows: the int32 differences of all indices would take four times the mask's memory.
    mask = np.concatenate([layout.sees(group, cols) for group in np.split(rows, layout.q_len // LANES)])
    return splash.make_dynamic_splash_mqa(jnp.asarray(mask), config=config)
