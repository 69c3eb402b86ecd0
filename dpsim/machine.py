"""``Machine``: what a run runs on. What collectives cost, how communication and computation slow each other, memory."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path
from typing import Any, Literal

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.layout import check_layout
from dpsim.units import parse_bandwidth, parse_duration

SCHEMA = "dpsim.machine/1"
NODE = "node"
_MOST_BYTES = 2**60
_MOST_DEVICES = 10**12


class Network(Noun, frozen=True):
    """What joins the devices: ``node`` (this machine as it is) or an emulated link ``paced:LATENCY,BANDWIDTH``."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    token: str = NODE

    @property
    def emulated(self) -> bool:
        return self.token != NODE

    @property
    def usual_algorithm(self) -> str:
        """The algorithm taken when none is named: MPI's own, or ``ring`` where MPI's own cannot run."""
        return "ring" if self.emulated else "mpi"

    @staticmethod
    def parse(token: str) -> Network:
        """``node`` or ``paced:50us,1gbit``. Raises ``ConfigError``."""
        if token == NODE:
            return Network()
        kind, _, rest = token.partition(":")
        parts = rest.split(",")
        if kind != "paced" or len(parts) != 2:
            raise ConfigError(
                f"network {token!r} is not understood",
                allowed="node, or paced:LATENCY,BANDWIDTH",
                remedy="write it like paced:50us,1gbit",
            )
        return Network(latency_s=parse_duration(parts[0]), bandwidth_bytes_per_s=parse_bandwidth(parts[1]), token=token)


def check_algorithm(algorithm: str, network: Network) -> None:
    """Refuse MPI's own allreduce on an emulated network, whose messages cannot be held to the link."""
    if algorithm == "mpi" and network.emulated:
        raise ConfigError(
            f"algorithm 'mpi' cannot run on {network.token}: MPI's own allreduce hides its messages from it",
            allowed="ring, recursive-doubling, halving-doubling, direct, hierarchical",
            remedy="choose one of them with --algorithm, or use --network node",
        )


class Link(Noun, frozen=True):
    """Alpha, beta and gamma of ``reference formulas``: what prices an allreduce that no table covers."""

    latency_s: float
    bandwidth_bytes_per_s: float
    reduce_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0 and self.bandwidth_bytes_per_s > 0):
            raise ConfigError(
                f"link with latency_s {self.latency_s}, bandwidth_bytes_per_s {self.bandwidth_bytes_per_s}",
                allowed="latency_s >= 0, bandwidth_bytes_per_s > 0",
            )
        if not (math.isfinite(self.reduce_s_per_byte) and self.reduce_s_per_byte >= 0):
            raise ConfigError(f"reduce_s_per_byte is {self.reduce_s_per_byte}", allowed="finite, >= 0")


def _check_devices(what: str, devices: int) -> None:
    if not 1 <= devices <= _MOST_DEVICES:
        raise ConfigError(f"{what} for {devices} devices", allowed=f"1 to {_MOST_DEVICES:.0e} devices")


def _check_table(what: str, sizes: tuple[int, ...], *columns: tuple[float, ...]) -> None:
    if not sizes or any(a >= b for a, b in itertools.pairwise((-1, *sizes, _MOST_BYTES + 1))):
        raise ConfigError(
            f"{what} has sizes_bytes {list(sizes)}", allowed="one or more sizes from 0 to 2^60, ascending"
        )
    for column in columns:
        if len(column) != len(sizes):
            raise ConfigError(f"{what} has {len(column)} times for {len(sizes)} sizes", allowed="one a size")
        if any(not math.isfinite(t) or t < 0 for t in column):
            raise ConfigError(f"{what} has times {list(column)}", allowed="finite seconds >= 0")


class AllreduceCost(Noun, frozen=True):
    """Seconds of one allreduce against its size, with nothing else running: measured, or published.

    ``layout`` is as in a ``Plan``.
    """

    algorithm: str
    devices: int
    sizes_bytes: tuple[int, ...]
    time_s: tuple[float, ...]
    wire_dtype: str = "float32"
    layout: str = ""

    def __post_init__(self) -> None:
        _check_devices(f"an allreduce table {self.algorithm!r}", self.devices)
        check_layout(self.layout, self.devices)
        _check_table(f"allreduce table {self.algorithm!r} at {self.devices} devices", self.sizes_bytes, self.time_s)


class OverlapCost(Noun, frozen=True):
    """One allreduce beside a running backward: its time, and the compute time it takes away, against its size.

    ``poll_s`` is the compute time one look at the communication costs (mechanism ``poll``).
    """

    algorithm: str
    devices: int
    overlap: Literal["poll", "thread"]
    sizes_bytes: tuple[int, ...]
    time_s: tuple[float, ...]
    compute_loss_s: tuple[float, ...]
    poll_s: float = 0.0
    wire_dtype: str = "float32"
    layout: str = ""

    def __post_init__(self) -> None:
        what = f"overlap table {self.algorithm!r}/{self.overlap!r} at {self.devices} devices"
        _check_devices(f"an overlap table {self.algorithm!r}/{self.overlap!r}", self.devices)
        check_layout(self.layout, self.devices)
        _check_table(what, self.sizes_bytes, self.time_s, self.compute_loss_s)
        if not (math.isfinite(self.poll_s) and self.poll_s >= 0):
            raise ConfigError(f"{what} has poll_s {self.poll_s}", allowed="finite seconds >= 0")


class ComputeSlowdown(Noun, frozen=True):
    """How much longer computation takes when this many devices of a node compute at once (1 = no longer)."""

    devices: int
    factor: float

    def __post_init__(self) -> None:
        _check_devices("a compute slowdown", self.devices)
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ConfigError(f"compute slowdown at {self.devices} devices is {self.factor}", allowed="more than 0")


class Machine(Noun, frozen=True, dict=True):
    """What a run runs on. Tables first; the link's formula where no table covers an algorithm or device count.

    ``link`` joins all devices; in a layout of several nodes it joins the nodes, and ``link_in_node``, where it is
    given, the devices of one node.
    """

    name: str
    network: str = NODE
    emulated_network: bool = False
    allreduce: tuple[AllreduceCost, ...] = ()
    overlap: tuple[OverlapCost, ...] = ()
    compute_slowdown: tuple[ComputeSlowdown, ...] = ()
    link: Link | None = None
    memory_bytes: float = math.inf
    cores: int = 0
    calibrated_on: str = ""
    source: str = ""
    schema: str = SCHEMA
    link_in_node: Link | None = None

    def __post_init__(self) -> None:
        if not self.allreduce and self.link is None:
            raise ConfigError(
                f"machine {self.name!r} says nothing about the cost of an allreduce",
                allowed="an [[allreduce]] table or a [link]",
            )
        if not self.memory_bytes > 0:
            raise ConfigError(f"memory_bytes is {self.memory_bytes}", allowed="more than 0")

    @functools.cached_property
    def memo(self) -> dict[Any, Any]:
        """Where the model keeps arrays that it derived from this machine alone."""
        return {}


def read(path: Path) -> Machine:
    """Read a machine file (``.json`` or ``.toml``). Raises ``FileFormatError``."""
    return codec.read(path, Machine, "machine", SCHEMA)
