"""Several devices and several machines."""
