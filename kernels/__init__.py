"""Compute kernels: one file an operation, the reference first. Imported as ``dpsim.kernels``."""
