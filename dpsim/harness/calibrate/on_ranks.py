"""Measures allreduces on running ranks: alone, and beside a computation that they slow and that slows them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.comm.allreduce import prepare
from dpsim.comm.clock import now
from dpsim.comm.compression import compression
from dpsim.comm.group import first_ranks, quiet_barrier
from dpsim.comm.networks import transport
from dpsim.comm.progress import progress
from dpsim.comm.selection import select, sizes
from dpsim.comm.transport import Array, Transport
from dpsim.harness.calibrate.calibrate import CalibrateConfig
from dpsim.harness.calibrate.contention import Crowd
from dpsim.harness.calibrate.load import Load, ReplicaLoad, StandIn, nothing
from dpsim.harness.measurement.reference import SpeedLog, reference_s, unfinished
from dpsim.harness.measurement.speed import NARROW, factors, slow_factor
from dpsim.layout import node_counts
from dpsim.machine import AllreduceCost, Network, OverlapCost, Selection

Progress = Callable[[str], None]
_LEAST_LOAD_S = 1e-3
_LOADED_S = 4e-3
_MOST_AT_ONCE = 20
_ALONE_A_ROUND = 3
_GLOBAL_BATCH = 64  # float16 is scaled for one; which one costs nothing
LEAST_ROUNDS, MOST_ROUNDS = 5, 60


class Calibrating:
    """One network's tables being measured, round by round. Collective over ``comm``."""

    def __init__(self, comm: MPI.Intracomm, config: CalibrateConfig, speeds: SpeedLog) -> None:
        self._comm, self._config, self._speeds = comm, config, speeds
        network = Network.parse(config.network)
        self._alone: list[_Alone] = []
        self._beside: list[_Beside] = []
        self._selection: dict[int, Selection] = {}
        counts = dict.fromkeys(devices for devices, _ in config.layouts())
        self._crowds = [Crowd(comm, devices, speeds) for devices in counts]
        for devices, layout in config.layouts():
            of_a_node = node_counts(layout, devices)[1]
            group = first_ranks(comm, devices)
            for algorithm in config.algorithms:
                if group is None:
                    continue
                chosen = None
                if algorithm == "auto":
                    chosen = self._selection[devices] = (
                        self._selection.get(devices) or select(group) or Selection.usual(devices)
                    )
                link = transport(group, network, of_a_node, chosen)
                table = _Alone(group, link, algorithm, layout, config, speeds)
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
            table.round()
        for beside in self._beside:
            beside.round()
        quiet_barrier(self._comm)
        for crowd in self._crowds:
            crowd.round()

    def settled(self) -> bool:
        """Whether the machine is steady and every compute slowdown is known well enough; on rank 0."""
        return self._speeds.steady() and all(crowd.result().half_width <= NARROW for crowd in self._crowds)

    def result(self) -> dict[str, Any] | None:
        """The tables as plain values, on rank 0."""
        tables = {
            "allreduce": [table.result() for table in self._alone],
            "overlap": [beside.result() for beside in self._beside],
            "selection": list(self._selection.values()),
            "compute_slowdown": [crowd.result() for crowd in self._crowds],
            "speed": [speed for crowd in self._crowds[-1:] for speed in crowd.speed()],
        }
        for beside in self._beside:
            beside.close()
        return {name: codec.to_builtins(table) for name, table in tables.items()} if self._comm.rank == 0 else None


def calibrate_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """The calibration of one ``CalibrateConfig`` on running ranks; rank 0 returns its tables (plain values)."""
    config = codec.decode(argument, CalibrateConfig, "calibration")
    counts = " and ".join(layout or str(devices) for devices, layout in config.layouts())
    report(f"calibrating {', '.join(config.algorithms)} on {counts} devices, network {config.network}")
    calibrating = Calibrating(comm, config, SpeedLog())
    start_s, rounds = now(), 0
    while rounds < LEAST_ROUNDS or (
        rounds < MOST_ROUNDS and unfinished(comm, start_s, config.seconds, calibrating.settled)
    ):
        calibrating.round()
        rounds += 1
    return calibrating.result()


class _Alone:
    """Time of one allreduce at each size with nothing else running.

    The buffer is rewritten before each one, as backward does.
    """

    def __init__(
        self,
        group: MPI.Intracomm,
        link: Transport,
        algorithm: str,
        layout: str,
        config: CalibrateConfig,
        speeds: SpeedLog,
    ) -> None:
        self.group, self.link, self.algorithm, self.layout = group, link, algorithm, layout
        self.compression = compression(config.wire_dtype, np.dtype(np.float32), _GLOBAL_BATCH)
        self.wire_dtype = config.wire_dtype or "float32"
        self.sizes = sizes(config.max_bytes)
        self._buffers = {size: link.allocate(size).view(np.float32) for size in self.sizes}
        self._allreduces = {
            size: prepare(link, data, algorithm, self.compression) for size, data in self._buffers.items()
        }
        self.speeds = speeds
        self._rows: list[list[float]] = []
        self._reference_s: list[float] = []
        self._random = np.random.default_rng(0)
        self._warm = False

    def round(self) -> None:
        """A visit: each size a few times, in random order."""
        before_s = reference_s(self.group)
        rows = [self._each_size() for _ in range(_ALONE_A_ROUND)][0 if self._warm else 1 :]
        speed_s = self.speeds.visited(self.group.size, before_s, reference_s(self.group))
        self._rows += rows
        self._reference_s += [speed_s] * len(rows)
        self._warm = True

    def _each_size(self) -> list[float]:
        """Seconds of one allreduce of each size."""
        found = [0.0] * len(self.sizes)
        for index in self._random.permutation(len(self.sizes)):
            size = self.sizes[index]
            self._buffers[size][...] = 1.0
            self.group.Barrier()
            start_s = now()
            self._allreduces[size].run()
            found[index] = now() - start_s
        return found

    def result(self) -> AllreduceCost:
        time_s, factor = _slowest(self.group, self._rows, self._reference_s, self.speeds)
        return AllreduceCost(
            algorithm=self.algorithm,
            devices=self.group.size,
            layout=self.layout,
            sizes_bytes=tuple(self.sizes),
            time_s=time_s,
            wire_dtype=self.wire_dtype,
            slow_factor=factor,
        )


class _Beside:
    """Allreduces under a running load: how long each takes, and how much longer the load takes for each.

    The load and the load with allreduces alternate; every allreduce ends well before the load does.
    """

    def __init__(self, alone: _Alone, link: Transport, overlap: str, load: Load) -> None:
        self._alone, self._overlap, self._load = alone, overlap, load
        self._done: list[tuple[float, float]] = []
        self._mechanism = progress(link, alone.algorithm, overlap, self._finished, alone.compression)
        self._points = alone.sizes[-1::-2][::-1]  # every second size, the largest among them
        self._buffers: dict[int, list[Array]] = {}
        self._units: dict[int, int] = {}
        self._times: dict[int, list[list[float]]] = {size: [] for size in self._points}
        self._losses: dict[int, list[float]] = {size: [] for size in self._points}
        self._reference_s: dict[int, list[float]] = {size: [] for size in self._points}
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
        before_s = reference_s(group)
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
            after_s = reference_s(group)
            if self._warm:
                self._times[size].append([sum(end - begin for begin, end in self._done) / many])
                self._losses[size].append((loaded_s - plain_s) / many)
                self._reference_s[size].append(self._alone.speeds.visited(group.size, before_s, after_s))
            before_s = after_s
        self._warm = True

    def result(self) -> OverlapCost:
        group, speeds = self._alone.group, self._alone.speeds
        times, losses = [], []
        for size, references in self._reference_s.items():
            times.append(_slowest(group, self._times[size], references, speeds))
            mixture = speeds.mixture(group.size)
            loss = np.mean(group.allgather(self._losses[size]), axis=0) / factors(references, mixture, mixture.change)
            losses.append(max(0.0, float(np.median(loss))))
        return OverlapCost(
            algorithm=self._alone.algorithm,
            devices=group.size,
            layout=self._alone.layout,
            overlap=cast(Literal["poll", "thread"], self._overlap),
            sizes_bytes=tuple(self._points),
            time_s=tuple(time_s for (time_s,), _ in times),
            compute_loss_s=tuple(losses),
            wire_dtype=self._alone.wire_dtype,
            slow_factor=statistics.median(factor for _, factor in times),
        )

    def close(self) -> None:
        self._mechanism.close()


def _slowest(
    group: MPI.Intracomm, rows: list[list[float]], reference_s: list[float], speeds: SpeedLog
) -> tuple[tuple[float, ...], float]:
    """(median over repeats of the slowest rank's time at full speed, one a column; how much longer at the slow one).

    ``rows`` are repeats with one time a column, each with the reference time of its visit. Collective.
    """
    slowest, mixture = np.max(group.allgather(rows), axis=0), speeds.mixture(group.size)
    relative = slowest / np.median(slowest, axis=0)
    factor = slow_factor(relative.ravel(), np.repeat(reference_s, relative.shape[1]).tolist(), mixture)
    full = np.median(slowest / factors(reference_s, mixture, factor)[:, None], axis=0)
    return tuple(full.tolist()), factor
