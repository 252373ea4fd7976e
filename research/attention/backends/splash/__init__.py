"""tokamax's splash attention kernels: the backend for TPUs."""

from research.attention.backends.splash.attend import compute, cost, prepare, resolve

__all__ = ["compute", "cost", "prepare", "resolve"]
