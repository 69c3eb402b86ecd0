"""Records that a sweep, a benchmark and a reproducibility check leave behind: immutable, versioned, with raw samples.

Records load neither kernels nor anything that renders. What is derived from them is computed in the harness, and how it
is shown is decided in the report.
"""
