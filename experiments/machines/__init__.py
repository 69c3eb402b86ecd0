"""Workloads and machines made from published measurements, and benchmark logs that ``calibrate --from`` reads."""
