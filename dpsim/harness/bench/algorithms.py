"""The algorithms that an allreduce benchmark can measure: the kernels, and those that send messages."""

from __future__ import annotations

from dpsim.algorithms import ALGORITHMS
from dpsim.backend import Backend
from dpsim.errors import unknown
from dpsim.kernels.allreduce.registry import versions
from dpsim.records.bench import AllreduceBench

MESSAGES = "-messages"
"""The suffix of an algorithm that sends messages, where a version in shared memory has the plain name."""


def bench_algorithms(backend: Backend) -> tuple[str, ...]:
    """Return all algorithms: the kernels, and on CPUs also MPI's own allreduce and those that send messages."""
    kernels = tuple(version.name for version in versions(backend))
    if backend == "cuda":
        return kernels
    others = (
        name
        for name, algorithm in ALGORITHMS.items()
        if algorithm.place in ("messages", "library") and name != "hierarchical"
    )
    return (*kernels, *(name + MESSAGES * (name in kernels) for name in others))


def check_algorithms(bench: AllreduceBench) -> None:
    """Raise ``ConfigError`` for an algorithm that the benchmark's backend does not have."""
    allowed = bench_algorithms(bench.backend)
    for algorithm in bench.algorithms:
        if algorithm not in allowed:
            raise unknown("algorithm", algorithm, ("all", *allowed))
