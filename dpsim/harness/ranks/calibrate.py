"""Measures allreduces on running ranks: alone, and beside a computation that they slow and that slows them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.comm.allreduce import allreduce
from dpsim.comm.clock import now
from dpsim.comm.group import first_ranks, quiet_barrier
from dpsim.comm.progress import progress
from dpsim.comm.transport import Array, Transport, transport
from dpsim.comm.wire import wire
from dpsim.harness.calibrate import CalibrateConfig
from dpsim.harness.ranks.load import Load, ReplicaLoad, StandIn, nothing
from dpsim.kernels.allreduce.cpu import STAGE_BYTES
from dpsim.layout import node_counts
from dpsim.machine import AllreduceCost, ComputeSlowdown, Network, OverlapCost, Selection

Progress = Callable[[str], None]
_LEAST_LOAD_S = 1e-3
_LOADED_S = 4e-3
_MOST_AT_ONCE = 20
_ALONE_A_ROUND = 3
_SMALLEST_BYTES, _FACTOR = 1024, 4
_GLOBAL_BATCH = 64  # float16 is scaled for one; which one costs nothing
_SELECTING = 40
LEAST_ROUNDS, MOST_ROUNDS = 5, 60


class Calibrating:
    """One network's tables being measured, round by round. Collective over ``comm``."""

    def __init__(self, comm: MPI.Intracomm, config: CalibrateConfig) -> None:
        self._comm, self._config = comm, config
        network = Network.parse(config.network)
        self._alone: list[_Alone] = []
        self._beside: list[_Beside] = []
        self._selection: dict[int, Selection] = {}
        counts = dict.fromkeys(devices for devices, _ in config.layouts())
        self._crowds = [_Crowd(comm, devices) for devices in counts if not config.model]
        for devices, layout in config.layouts():
            of_a_node = node_counts(layout, devices)[1]
            group = first_ranks(comm, devices)
            for algorithm in config.algorithms:
                if group is None:
                    continue
                chosen = None
                if algorithm == "auto":
                    chosen = self._selection[devices] = self._selection.get(devices) or select(group)
                link = transport(group, network, of_a_node, chosen)
                table = _Alone(group, link, algorithm, layout, config)
                self._alone.append(table)
                load: Load = (
                    ReplicaLoad(config.model, config.dataset, config.local_batch) if config.model else StandIn()
                )
                for overlap in config.overlaps:
                    self._beside.append(_Beside(table, transport(group, network, of_a_node, chosen), overlap, load))
            quiet_barrier(comm)

    def round(self) -> None:
        """A few more samples of every table."""
        for table in self._alone:
            for _ in range(_ALONE_A_ROUND):
                table.round()
        for beside in self._beside:
            beside.round()
        quiet_barrier(self._comm)
        for crowd in self._crowds:
            crowd.round()

    def result(self) -> dict[str, Any] | None:
        """The tables as plain values, on rank 0."""
        tables = {
            "allreduce": [table.result() for table in self._alone],
            "overlap": [beside.result() for beside in self._beside],
            "selection": list(self._selection.values()),
            "compute_slowdown": [crowd.result() for crowd in self._crowds],
        }
        for beside in self._beside:
            beside.close()
        return {name: codec.to_builtins(table) for name, table in tables.items()} if self._comm.rank == 0 else None


def calibrate_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """The calibration of one ``CalibrateConfig`` on running ranks; rank 0 returns its tables (plain values)."""
    config = codec.decode(argument, CalibrateConfig, "calibration")
    counts = " and ".join(layout or str(devices) for devices, layout in config.layouts())
    report(f"calibrating {', '.join(config.algorithms)} on {counts} devices, network {config.network}")
    calibrating = Calibrating(comm, config)
    end_s = now() + config.seconds
    rounds = 0
    while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and comm.bcast(now() < end_s)):
        calibrating.round()
        rounds += 1
    return calibrating.result()


class _Crowd:
    """How much longer the stand-in load takes on several ranks at once than on rank 0 alone; the two alternate."""

    def __init__(self, comm: MPI.Intracomm, devices: int) -> None:
        self._comm, self._devices = comm, devices
        self._load = StandIn()
        self._times: dict[bool, list[float]] = {True: [], False: []}

    def round(self) -> None:
        for together in (False, True):
            quiet_barrier(self._comm)
            if self._comm.rank < (self._devices if together else 1):
                self._times[together].append(self._load.run(math.ceil(_LEAST_LOAD_S / self._load.unit_s), nothing))

    def result(self) -> ComputeSlowdown:
        known = self._comm.rank == 0
        ratio = statistics.median(self._times[True]) / statistics.median(self._times[False]) if known else 1.0
        return ComputeSlowdown(devices=self._devices, factor=ratio)


class _Alone:
    """Time of one allreduce at each size with nothing else running.

    The buffer is rewritten before each one, as backward does.
    """

    def __init__(
        self, group: MPI.Intracomm, link: Transport, algorithm: str, layout: str, config: CalibrateConfig
    ) -> None:
        self.group, self.link, self.algorithm, self.layout = group, link, algorithm, layout
        self.wire = wire(config.wire_dtype, np.dtype(np.float32), _GLOBAL_BATCH)
        self.wire_dtype = config.wire_dtype or "float32"
        self.sizes = sizes(config.max_bytes)
        self._buffers = {size: link.allocate(size).view(np.float32) for size in self.sizes}
        self._samples: dict[int, list[float]] = {size: [] for size in self.sizes}
        self._random = np.random.default_rng(0)
        self._warm = False

    def round(self) -> None:
        for index in self._random.permutation(len(self.sizes)):
            size = self.sizes[index]
            self._buffers[size][...] = 1.0
            self.group.Barrier()
            start_s = now()
            allreduce(self.link, self._buffers[size], self.algorithm, self.wire)
            if self._warm:
                self._samples[size].append(now() - start_s)
        self._warm = True

    def result(self) -> AllreduceCost:
        cost = _slowest(self.group, self._samples)
        return AllreduceCost(
            algorithm=self.algorithm, devices=self.group.size, layout=self.layout, sizes_bytes=tuple(self.sizes),
            time_s=tuple(cost[size] for size in self.sizes), wire_dtype=self.wire_dtype,
        )  # fmt: skip


class _Beside:
    """Allreduces under a running load: how long each takes, and how much longer the load takes for each.

    The load and the load with allreduces alternate; every allreduce ends well before the load does.
    """

    def __init__(self, alone: _Alone, link: Transport, overlap: str, load: Load) -> None:
        self._alone, self._overlap, self._load = alone, overlap, load
        self._done: list[tuple[float, float]] = []
        self._mechanism = progress(link, alone.algorithm, overlap, self._finished, alone.wire)
        self._points = alone.sizes[-1::-2][::-1]  # every second size, the largest among them
        self._buffers: dict[int, list[Array]] = {}
        self._units: dict[int, int] = {}
        self._times: dict[int, list[float]] = {size: [] for size in self._points}
        self._losses: dict[int, list[float]] = {size: [] for size in self._points}
        self._warm = False

    def _finished(self, bucket: int, size_bytes: int, start_s: float, end_s: float) -> None:
        self._done.append((start_s, end_s))

    def _plan(self) -> None:
        """How many allreduces of each size to hand in at once, and how long a load that takes."""
        cost = self._alone.result()
        unit_s = max(self._alone.group.allgather(self._load.unit_s))
        for size, solo_s in zip(cost.sizes_bytes, cost.time_s, strict=True):
            if size in self._times:
                many = max(1, min(_MOST_AT_ONCE, int(_LOADED_S / max(solo_s, 1e-6))))
                self._buffers[size] = [self._alone.link.allocate(size).view(np.float32) for _ in range(many)]
                self._units[size] = math.ceil(2.5 * max(many * solo_s, _LEAST_LOAD_S) / unit_s)

    def round(self) -> None:
        if not self._units:
            self._plan()
        group, load, mechanism = self._alone.group, self._load, self._mechanism
        for size in self._points:
            many = len(self._buffers[size])
            group.Barrier()
            plain_s = load.run(self._units[size], nothing)
            group.Barrier()
            self._done.clear()
            start_s = now()
            for buffer in self._buffers[size]:
                mechanism.submit(0, buffer)
            load.run(self._units[size], mechanism.poll)
            loaded_s = now() - start_s
            mechanism.finish()
            if self._warm:
                self._times[size].append(sum(end - begin for begin, end in self._done) / many)
                self._losses[size].append((loaded_s - plain_s) / many)
        self._warm = True

    def result(self) -> OverlapCost:
        group = self._alone.group
        times = _slowest(group, self._times)
        losses = {
            size: max(0.0, float(np.median(np.mean(group.allgather(row), axis=0))))
            for size, row in self._losses.items()
        }
        return OverlapCost(
            algorithm=self._alone.algorithm, devices=group.size, layout=self._alone.layout,
            overlap=cast(Literal["poll", "thread"], self._overlap), sizes_bytes=tuple(self._points),
            time_s=tuple(times[size] for size in self._points),
            compute_loss_s=tuple(losses[size] for size in self._points), wire_dtype=self._alone.wire_dtype,
        )  # fmt: skip

    def close(self) -> None:
        self._mechanism.close()


def select(group: MPI.Intracomm) -> Selection:
    """Up to which size ``one-shot`` is faster than ``two-shot``; both in turn, a fraction of a second. Collective."""
    link = transport(group, Network())
    points = [size for size in sizes(STAGE_BYTES) if size <= STAGE_BYTES]
    memory = link.allocate(STAGE_BYTES).view(np.float32)
    if link.prepare(memory, "two-shot", None) is None:
        return Selection.usual(group.size)
    samples: dict[tuple[str, int], list[float]] = {}
    for number in range(_SELECTING):
        for size, name in itertools.product(points, ("one-shot", "two-shot")):
            data = memory[: size // 4]
            data[...] = 1.0
            group.Barrier()
            start_s = now()
            allreduce(link, data, name)
            if number:
                samples.setdefault((name, size), []).append(now() - start_s)
    slowest = {
        key: statistics.median(max(row) for row in zip(*group.allgather(times), strict=True))
        for key, times in samples.items()
    }
    faster = itertools.takewhile(lambda size: slowest["one-shot", size] < slowest["two-shot", size], points)
    largest = group.bcast(max(faster, default=0))
    if not largest:
        return Selection(devices=group.size, algorithms=("two-shot",), below_bytes=())
    return Selection(devices=group.size, below_bytes=(largest + 1,))


def sizes(max_bytes: int) -> list[int]:
    """4 B, then 1 KiB and up by a factor of 4, ending at ``max_bytes`` (rounded down to a multiple of 4)."""
    points = [4]
    size = _SMALLEST_BYTES
    while size < max_bytes:
        points.append(size)
        size *= _FACTOR
    largest = max_bytes // 4 * 4
    return points if largest == points[-1] else [*points, largest]


def _slowest(group: MPI.Intracomm, samples: dict[int, list[float]]) -> dict[int, float]:
    """Median over repeats of the slowest rank's time."""
    return {
        key: statistics.median(max(row) for row in zip(*group.allgather(times), strict=True))
        for key, times in samples.items()
    }
