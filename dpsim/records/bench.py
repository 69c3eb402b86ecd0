"""The allreduce benchmark: its configuration, and the record of what was measured, with every raw sample."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from dpsim import codec
from dpsim.algorithms import Backend
from dpsim.codec import Noun
from dpsim.errors import ConfigError, unknown
from dpsim.network import NODE, Network
from dpsim.records.sweep import Environment
from dpsim.units import ITEM_BYTES, format_size

SCHEMA = "dpsim.bench/1"
RECORD = "allreduce.json"
CPU_DTYPES = ("float32", "float64")
PEERS = ("mpi", "gloo", "nccl")
CUDA_PEERS = ("nccl",)
OWN = "dpsim"
BETWEEN = "dpsim-gpus"
"""dpsim's kernels between several GPUs; ``OWN`` runs on logical devices of one GPU."""


class AllreduceBench(Noun, frozen=True):
    """An allreduce benchmark on ``devices`` devices of this machine; on a shaped ``network`` each is a host.

    Sizes grow from ``min_bytes`` (0: one element) to ``max_bytes`` by ``factor``. ``algorithms`` are dpsim's own; empty
    means all, and the default algorithm is always measured. ``peers`` are kinds of peers or names in ``peer_envs``;
    ``None`` means every peer that is installed. ``peer_envs`` maps a name to a virtual environment with another MPI
    library or with PyTorch. ``budget_s`` bounds the measuring, not the starting and the checking.
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
    network: str = NODE

    def __post_init__(self) -> None:
        if not 2 <= self.devices <= 1024:
            raise ConfigError(f"devices is {self.devices}", allowed="2 to 1024", remedy="give --devices 2 or more")
        self._check_network()
        self._check_sizes()
        dtypes = CPU_DTYPES if self.backend == "cpu" else tuple(ITEM_BYTES)
        if self.dtype not in dtypes:
            raise ConfigError(f"dtype {self.dtype} on backend {self.backend}", allowed=", ".join(dtypes))
        for peer in self.peers or ():
            if peer not in (*PEERS, *self.peer_envs):
                raise unknown("peer", peer, ("auto", "none", *PEERS, *self.peer_envs))
            if self.backend == "cuda" and peer not in CUDA_PEERS:
                raise ConfigError(
                    f"the peer {peer} on backend cuda: it reduces on CPUs",
                    allowed=", ".join(CUDA_PEERS),
                    remedy="leave --peers out, or use --backend cpu",
                )
        for name in self.peer_envs:
            if name in (*PEERS, OWN):
                raise ConfigError(f"a peer environment named {name!r}", allowed=f"any name but {', '.join(PEERS)}")
        if not (math.isfinite(self.budget_s) and self.budget_s > 0):
            raise ConfigError(f"the budget is {self.budget_s} s", allowed="more than 0 s", remedy="give --budget 60s")

    def _check_network(self) -> None:
        network = Network.parse(self.network)
        if network.paced or (network.shaped and self.backend == "cuda"):
            raise ConfigError(
                f"the network {self.network} on backend {self.backend}",
                allowed="node, or on backend cpu shaped:HOSTSxBANDWIDTH",
                remedy="write it like shaped:4x200mbit",
            )
        if network.shaped and self.devices != network.hosts:
            raise ConfigError(
                f"{self.devices} devices on {self.network}",
                allowed=f"{network.hosts}: each is a host",
                remedy="leave --devices out",
            )

    def line_s(self, size_bytes: int) -> float | None:
        """Return the bound of an allreduce between hosts: 2 (n - 1) / n of its bytes at the slowest link's rate."""
        network = Network.parse(self.network)
        if not network.shaped:
            return None
        return 2 * (self.devices - 1) / self.devices * size_bytes / min(network.rates_bytes_per_s())

    def _check_sizes(self) -> None:
        item_bytes = ITEM_BYTES.get(self.dtype)
        if item_bytes is None:
            raise unknown("dtype", self.dtype, ITEM_BYTES)
        if self.factor < 2:
            raise ConfigError(f"factor is {self.factor}", allowed="2 or more", remedy="give --factor 2 or 4")
        low = self.min_bytes or item_bytes
        if low % item_bytes:
            raise ConfigError(f"sizes from {low} bytes for {self.dtype}", allowed=f"multiples of {item_bytes} bytes")
        if self.max_bytes < low:
            raise ConfigError(
                f"sizes from {format_size(low)} to {format_size(self.max_bytes)}",
                allowed="--max at or above --min",
                remedy="exchange the two",
            )

    def sizes(self) -> list[int]:
        """Return the sizes in bytes: min, min factor, min factor^2, ... up to max."""
        sizes = [self.min_bytes or ITEM_BYTES[self.dtype]]
        while sizes[-1] * self.factor <= self.max_bytes:
            sizes.append(sizes[-1] * self.factor)
        return sizes


class System(Noun, frozen=True):
    """A system that was measured: dpsim, or a peer with its library and ``how`` its processes ran.

    Systems with the same library (such as its thread levels) share one ``peer`` name. ``simulated`` marks runs in
    numba's CUDA simulator; their times mean nothing.
    """

    name: str
    peer: str
    kind: Literal["dpsim", "mpi", "gloo", "nccl"]
    library: str = ""
    how: str = ""
    simulated: bool = False


class Series(Noun, frozen=True):
    """Call times of one algorithm of one system at one size: nanoseconds of the slowest rank, grouped by round.

    ``algorithm`` is ``scaling`` for the bound. ``repeat`` 1 is the second run of an A/A pair. ``wrong`` counts the
    elements that were not the exact sum; a series with any wrong element keeps no times.
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
    """Everything that a benchmark measured. Series of one size have the same number of rounds."""

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
            if series.size_bytes not in self.bench.sizes():
                sizes = ", ".join(map(str, self.bench.sizes()))
                raise ConfigError(
                    f"a series is of {series.size_bytes} bytes", allowed=f"the benchmark's sizes: {sizes}"
                )
        for size in self.bench.sizes():
            self._check_size(size, [series for series in self.series if series.size_bytes == size])

    def _check_size(self, size: int, members: list[Series]) -> None:
        """Check what a comparison needs: equally many rounds of every series, and the default algorithm."""
        rounds = {len(series.rounds_ns) for series in members if series.rounds_ns}
        if len(rounds) > 1:
            raise ConfigError(
                f"series of {format_size(size)} with {' and '.join(map(str, sorted(rounds)))} rounds",
                allowed="the same number of rounds in every series",
            )
        own = (series for series in members if series.system == OWN and series.in_place and not series.cached)
        if not any(series.default and not series.repeat for series in own):
            raise ConfigError(
                f"no series of dpsim's default algorithm at {format_size(size)}", allowed="one at every size"
            )


def read(path: Path) -> BenchRecord:
    """Read the record of a benchmark. Raises ``FileFormatError``."""
    return codec.read(path, BenchRecord, "benchmark", SCHEMA)
