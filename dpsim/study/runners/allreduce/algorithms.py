"""The algorithms that an allreduce benchmark can measure: kernels, those that send messages, and users' own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpsim import user_code
from dpsim.algorithms import Backend, algorithms_in
from dpsim.errors import ConfigError, unknown
from dpsim.kernels.allreduce.registry import versions
from dpsim.network import NODE
from dpsim.records.bench import AllreduceBench

_EXPECTED = user_code.Expected(
    noun="algorithm",
    default="allreduce",
    signature="{}(transport, data) yields its rounds of messages",
    remedy="see docs/extend.md",
)
MESSAGES = "-messages"
"""The suffix of an algorithm that sends messages, where a version in shared memory has the plain name."""

BETWEEN_HOSTS = "auto"
"""The default algorithm between hosts, which share no memory."""


def bench_algorithms(backend: Backend, network: str = NODE) -> tuple[str, ...]:
    """Return all algorithms: the kernels, and on CPUs also MPI's own allreduce and those that send messages.

    Between the hosts of a shaped network there are the latter alone, and ``auto``.
    """
    if network != NODE:
        return (BETWEEN_HOSTS, *(name for name in algorithms_in("library", "messages") if name != "hierarchical"))
    kernels = tuple(version.name for version in versions(backend))
    others = () if backend == "cuda" else algorithms_in("messages", "library")
    return (*kernels, *(name + MESSAGES * (name in kernels) for name in others if name != "hierarchical"))


def check_algorithms(bench: AllreduceBench) -> None:
    """Raise ``ConfigError`` for an algorithm that the benchmark's backend does not have, or that cannot be imported."""
    allowed = bench_algorithms(bench.backend, bench.network)
    for algorithm in bench.algorithms:
        if user_code.is_function(algorithm):
            if bench.backend == "cuda":
                raise ConfigError(
                    f"the algorithm {algorithm} on backend cuda: its messages go between processes on CPUs",
                    allowed=", ".join(("all", *allowed)),
                    remedy="leave --backend cuda out",
                )
            if bench.network != NODE:
                raise ConfigError(
                    f"the algorithm {algorithm} on {bench.network}", allowed=", ".join(allowed), remedy="leave one out"
                )
            own_function(algorithm)
        elif algorithm not in allowed:
            raise unknown("algorithm", algorithm, ("all", *allowed, "FILE.py:FUNCTION"))
    names = [label(algorithm) for algorithm in bench.algorithms]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two algorithms are called {twice}", allowed="each once", remedy="rename one of the files")


def label(algorithm: str) -> str:
    """The name of an algorithm in the record, which may be published: of a user's own file without its folder."""
    return Path(algorithm).name if user_code.is_function(algorithm) else algorithm


def own_function(algorithm: str) -> Callable[..., Any]:
    """Import the function ``steps(transport, data)`` of a user. Raises ``ConfigError`` where it cannot be."""
    module, name, _ = user_code.imported(algorithm, _EXPECTED)
    function: Callable[..., Any] = getattr(module, name)
    return function
