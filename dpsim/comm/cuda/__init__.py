"""Allreduce in the memory of NVIDIA GPUs: devices, memory that all ranks' kernels reach, and the transport over it.

Importing this loads no CUDA. numba's simulator (``NUMBA_ENABLE_CUDASIM=1``) stands in for a GPU in tests: the same
transport and the same kernels, in host memory.
"""
