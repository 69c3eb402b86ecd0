"""Reads traces of PyTorch's profiler (Kineto) into workloads. Loads no torch."""
