"""The algorithms of dpsim that the allreduce benchmark can time, by backend."""

from __future__ import annotations

from dpsim.algorithms import ALGORITHMS
from dpsim.errors import unknown
from dpsim.kernels.allreduce.registry import versions
from dpsim.records.bench import MESSAGES, AllreduceBench, Backend


def bench_algorithms(backend: Backend) -> tuple[str, ...]:
    """All algorithms: the kernels, and on CPUs also MPI's own allreduce and those by messages on one node."""
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
    """Raise ``ConfigError`` for an algorithm that the benchmark does not know."""
    allowed = bench_algorithms(bench.backend)
    for algorithm in bench.algorithms:
        if algorithm not in allowed:
            raise unknown("algorithm", algorithm, ("all", *allowed))
