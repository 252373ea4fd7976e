"""`captured`: the whole mask as a NumPy array in the program (the slow baseline of seeds 000 and 001).

Serves sliding and HCA attention. The compiler carries all q_len x kv_len booleans, and folds what is computed of them.
"""

import jax.numpy as jnp
import numpy as np

from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash.layout import Layout
from research.hardware import LANES


def kernel(layout: Layout, config: splash.SplashConfig, given: None = None) -> splash.SplashAttentionKernel:
    """A kernel for every sequence of that layout."""
    del given
    rows, cols = np.arange(layout.q_len, dtype=np.int32)[:, None], np.arange(layout.kv_len, dtype=np.int32)[None]
    # Some rows at a time: the differences of indices would take four times the mask's bytes.
    mask = np.concatenate([layout.sees(some, cols) for some in np.split(rows, layout.q_len // LANES)])
    return splash.make_dynamic_splash_mqa(jnp.asarray(mask), config=config)
