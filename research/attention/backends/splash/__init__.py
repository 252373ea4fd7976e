"""tokamax's splash kernels: the TPU backend, and what serves it alone."""
