"""The allreduce benchmark: what is asked, and the record of what was measured, raw samples kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from dpsim import codec
from dpsim.algorithms import ALGORITHMS
from dpsim.backend import Backend
from dpsim.codec import Noun
from dpsim.errors import ConfigError, unknown
from dpsim.kernels.allreduce.registry import versions
from dpsim.records.sweep import Environment
from dpsim.units import ITEM_BYTES, format_size

SCHEMA = "dpsim.bench/1"
RECORD = "allreduce.json"
CPU_DTYPES = ("float32", "float64")
PEERS = ("mpi", "gloo", "nccl")
CUDA_PEERS = ("nccl",)
OWN = "dpsim"
BETWEEN = "dpsim-gpus"
"""dpsim's kernels between GPUs, where ``OWN`` are logical devices of one."""
MESSAGES = "-messages"
"""Ends the names of algorithms that send messages, where a version in shared memory has the plain name."""


def bench_algorithms(backend: Backend) -> tuple[str, ...]:
    """What ``all`` stands for: the kernels, and on CPUs MPI's own allreduce and what goes by messages on one node."""
    kernels = tuple(version.name for version in versions(backend))
    if backend == "cuda":
        return kernels
    others = (n for n, one in ALGORITHMS.items() if one.place in ("messages", "library") and n != "hierarchical")
    return (*kernels, *(name + MESSAGES * (name in kernels) for name in others))


class AllreduceBench(Noun, frozen=True):
    """An allreduce benchmark on ``devices`` devices of this machine, at sizes from ``min_bytes`` by ``factor``.

    ``algorithms``: dpsim's own, none for all; the default one is always among them. ``peers``: kinds of peers or names
    in ``peer_envs``, ``None`` for all that are found. ``peer_envs``: virtual environments with another MPI library or
    with PyTorch, by a name. ``budget_s`` bounds the measuring (not the starting and checking).
    """

    devices: int = 2
    min_bytes: int = 0
    max_bytes: int = 64 * 2**20
    factor: int = 4
    algorithms: tuple[str, ...] = ()
    dtype: str = "float32"
    backend: Backend = "cpu"
    peers: tuple[str, ...] | None = None
    peer_envs: dict[str, str] = {}  # noqa: RUF012  (msgspec copies it)
    budget_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.devices <= 1024:
            raise ConfigError(f"devices is {self.devices}", allowed="2 to 1024", remedy="give --devices 2 or more")
        self._check_sizes()
        for algorithm in self.algorithms:
            if algorithm not in (allowed := bench_algorithms(self.backend)):
                raise unknown("algorithm", algorithm, ("all", *allowed))
        kinds = CPU_DTYPES if self.backend == "cpu" else tuple(ITEM_BYTES)
        if self.dtype not in kinds:
            raise ConfigError(f"dtype {self.dtype} on backend {self.backend}", allowed=", ".join(kinds))
        for peer in self.peers or ():
            if peer not in (*PEERS, *self.peer_envs):
                raise unknown("peer", peer, ("auto", "none", *PEERS, *self.peer_envs))
            if self.backend == "cuda" and peer not in CUDA_PEERS:
                raise ConfigError(
                    f"the peer {peer} on backend cuda: it adds up on CPUs",
                    allowed=", ".join(CUDA_PEERS),
                    remedy="leave --peers out, or use --backend cpu",
                )
        for name in self.peer_envs:
            if name in (*PEERS, OWN):
                raise ConfigError(f"a peer environment named {name!r}", allowed=f"any name but {', '.join(PEERS)}")
        if not (math.isfinite(self.budget_s) and self.budget_s > 0):
            raise ConfigError(f"the budget is {self.budget_s} s", allowed="more than 0 s", remedy="give --budget 60s")

    def _check_sizes(self) -> None:
        item = ITEM_BYTES.get(self.dtype)
        if item is None:
            raise unknown("dtype", self.dtype, ITEM_BYTES)
        if self.factor < 2:
            raise ConfigError(f"factor is {self.factor}", allowed="2 or more", remedy="give --factor 2 or 4")
        low = self.min_bytes or item
        if low % item:
            raise ConfigError(f"sizes from {low} bytes for {self.dtype}", allowed=f"multiples of {item} bytes")
        if self.max_bytes < low:
            raise ConfigError(
                f"sizes from {format_size(low)} to {format_size(self.max_bytes)}",
                allowed="a --max that is not below --min",
                remedy="exchange them",
            )

    def sizes(self) -> list[int]:
        """The sizes in bytes: min, min factor, min factor^2, ... up to max."""
        item = ITEM_BYTES[self.dtype]
        found = [self.min_bytes or item]
        while found[-1] * self.factor <= self.max_bytes:
            found.append(found[-1] * self.factor)
        return found


class System(Noun, frozen=True):
    """Who took part: ``dpsim``, or a peer with its library and how its processes ran.

    ``peer`` is what several of one library have in common. ``simulated``: in numba's CUDA simulator, whose times mean
    nothing.
    """

    name: str
    peer: str
    kind: Literal["dpsim", "mpi", "gloo", "nccl"]
    library: str = ""
    how: str = ""
    simulated: bool = False


class Series(Noun, frozen=True):
    """The calls of one way to reduce at one size: the slowest rank's nanoseconds of each, round by round.

    ``algorithm`` is ``scaling`` for the bound. ``repeat`` 1: the second of an A/A pair. ``wrong`` counts elements that
    were not the exact sum; where there are any, no times are kept.
    """

    size_bytes: int
    system: str
    algorithm: str
    in_place: bool
    cached: bool
    wrong: int
    rounds_ns: tuple[tuple[int, ...], ...]
    repeat: int = 0
    default: bool = False


class BenchRecord(Noun, frozen=True):
    """Everything that a benchmark measured."""

    bench: AllreduceBench
    environment: Environment
    systems: tuple[System, ...]
    series: tuple[Series, ...]
    measured_from: str
    measured_until: str
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        names = [system.name for system in self.systems]
        for series in self.series:
            if series.system not in names:
                raise ConfigError(f"a series is of system {series.system!r}", allowed=", ".join(names) or "none")
        for size in self.bench.sizes():
            self._check_size(size, [series for series in self.series if series.size_bytes == size])

    def _check_size(self, size: int, here: list[Series]) -> None:
        """Ways are compared round by round, and with the default one."""
        rounds = {len(series.rounds_ns) for series in here if series.rounds_ns}
        if len(rounds) > 1:
            raise ConfigError(
                f"series of {format_size(size)} with {' and '.join(map(str, sorted(rounds)))} rounds",
                allowed="as many rounds of every way",
            )
        own = (s for s in here if s.system == OWN and s.in_place and not s.cached)
        if not any(series.default and not series.repeat for series in own):
            raise ConfigError(f"no series of dpsim's default at {format_size(size)}", allowed="one at every size")


def read(path: Path) -> BenchRecord:
    """Read a benchmark's record. Raises ``FileFormatError``."""
    return codec.read(path, BenchRecord, "benchmark", SCHEMA)
