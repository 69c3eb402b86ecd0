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
from dpsim.wire_dtype import SIXTEEN_BITS

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

    def usual_algorithm(self, wire_dtype: str | None = None) -> str:
        """The algorithm taken when none is named: the fastest by size; on a link ``ring``, or what can send 16 bits."""
        if not self.emulated:
            return "auto"
        return "direct" if wire_dtype in SIXTEEN_BITS else "ring"

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


SHARED_MEMORY_ALGORITHMS = ("auto", "one-shot", "two-shot")
"""Those that add in memory which all ranks of a node see. Where there is none, MPI's own allreduce is taken instead."""


def check_algorithm(algorithm: str, network: Network) -> None:
    """Refuse on an emulated network what sends no messages that can be held to the link."""
    if network.emulated and algorithm in ("mpi", *SHARED_MEMORY_ALGORITHMS):
        why = "MPI's own allreduce hides its messages from it" if algorithm == "mpi" else "it sends no messages"
        raise ConfigError(
            f"algorithm {algorithm!r} cannot run on {network.token}: {why}",
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


class Selection(Noun, frozen=True):
    """Which allreduce in shared memory is the fastest by size, on so many devices: what ``auto`` takes.

    ``algorithms[i]`` for messages below ``below_bytes[i]``, the last one for all others.
    """

    devices: int
    algorithms: tuple[str, ...] = ("one-shot", "two-shot")
    below_bytes: tuple[int, ...] = (4097,)

    def __post_init__(self) -> None:
        _check_devices("a selection", self.devices)
        if len(self.algorithms) != len(self.below_bytes) + 1 or not set(self.algorithms) <= {"one-shot", "two-shot"}:
            raise ConfigError(
                f"selection of {list(self.algorithms)} below {list(self.below_bytes)} bytes",
                allowed="one-shot and two-shot, one more than sizes",
            )
        if any(a >= b for a, b in itertools.pairwise((0, *self.below_bytes))):
            raise ConfigError(
                f"a selection's below_bytes is {list(self.below_bytes)}", allowed="ascending sizes above 0"
            )

    def algorithm(self, size_bytes: int) -> str:
        """What is taken for a message of that size."""
        return self.algorithms[sum(size_bytes >= bound for bound in self.below_bytes)]

    @staticmethod
    def usual(devices: int) -> Selection:
        """What is taken where nothing was measured. Two ranks never gain by looking at everything twice."""
        return (
            Selection(devices=2, algorithms=("two-shot",), below_bytes=())
            if devices == 2
            else Selection(devices=devices)
        )


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
    selection: tuple[Selection, ...] = ()

    def __post_init__(self) -> None:
        if not self.allreduce and self.link is None:
            raise ConfigError(
                f"machine {self.name!r} says nothing about the cost of an allreduce",
                allowed="an [[allreduce]] table or a [link]",
            )
        if not self.memory_bytes > 0:
            raise ConfigError(f"memory_bytes is {self.memory_bytes}", allowed="more than 0")

    def priced(self, algorithm: str, devices: int, layout: str = "") -> str:
        """The algorithm whose tables price one: its own; ``mpi``'s price ``auto`` where that has none of its own."""
        tables = {table.algorithm for table in self.allreduce if (table.devices, table.layout) == (devices, layout)}
        return "mpi" if algorithm == "auto" and "auto" not in tables and "mpi" in tables else algorithm

    def selected(self, devices: int) -> Selection | None:
        """What ``auto`` takes on so many devices, where it was measured."""
        return next((found for found in self.selection if found.devices == devices), None)

    @functools.cached_property
    def memo(self) -> dict[Any, Any]:
        """Where the model keeps arrays that it derived from this machine alone."""
        return {}


def read(path: Path) -> Machine:
    """Read a machine file (``.json`` or ``.toml``). Raises ``FileFormatError``."""
    return codec.read(path, Machine, "machine", SCHEMA)
