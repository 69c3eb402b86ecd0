"""The allreduce for NVIDIA GPUs. Importing this package loads no CUDA."""
