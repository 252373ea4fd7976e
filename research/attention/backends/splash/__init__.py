"""tokamax's splash kernels: the TPU backend, interpreted elsewhere, and what serves it alone."""

from research.attention.backends.splash.attend import compute, cost, prepare, resolve

__all__ = ["compute", "cost", "prepare", "resolve"]
