"""The tables of a calibration: how long an allreduce takes, with nothing else running and under load."""

from __future__ import annotations

import itertools
import math
from typing import Literal, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim.collective import CollectiveKind
from dpsim.comm.allreduce import prepare
from dpsim.comm.clock import now
from dpsim.comm.compression import compression
from dpsim.comm.group import quiet_start
from dpsim.comm.ordered_sum import ordered_sum
from dpsim.comm.progress import BucketAllreduce, Progress, progress
from dpsim.comm.selection import sizes
from dpsim.comm.transport import PersistentAllreduce, Transport
from dpsim.harness.calibrate.calibrate import CalibrateConfig
from dpsim.harness.calibrate.load import Load, nothing
from dpsim.harness.measurement.loop import Round
from dpsim.harness.measurement.scatter import TICK_S, median_error
from dpsim.machine import AllreduceCost, OverlapCost
from dpsim.plan import Plan
from dpsim.replica import Array
from dpsim.runtime.micro_batches import plan_partial_sums

_LEAST_LOAD_S = 1e-3
_LOADED_S = 4e-3
_MOST_AT_ONCE = 20
_IDLE_SAMPLES = 3
"""Allreduces of each size in a visit of an idle table."""
_MOST_SUMMED_BYTES = 2**16
"""Statistics of batch norm are small; larger ordered sums are extrapolated."""
_GLOBAL_BATCH = 64
"""The global batch for which float16 messages are scaled; the times do not depend on it."""


class CostTable:
    """The times of one allreduce at each size.

    ``_rows`` has a row of times for each repeat, one for each size. ``_visits`` counts the repeats of each visit.
    """

    def __init__(
        self,
        group: MPI.Intracomm,
        link: Transport,
        algorithm: str,
        layout: str,
        config: CalibrateConfig,
        kind: CollectiveKind = "allreduce",
    ) -> None:
        self.group, self.link, self.algorithm, self.layout, self.kind = group, link, algorithm, layout, kind
        self.compression = compression(config.wire_dtype, np.dtype(np.float32), _GLOBAL_BATCH)
        sums = kind == "ordered-sum"
        self.wire_dtype = config.wire_dtype if config.wire_dtype and not sums else "float32"
        self.sizes = sizes(min(config.max_bytes, _MOST_SUMMED_BYTES) if sums else config.max_bytes)
        self._rows: list[list[float]] = []
        self._visits: list[int] = []
        self._prepare()

    def _prepare(self) -> None:
        """Allocate what is reduced. Collective."""

    def _visited(self, rows: list[list[float]]) -> None:
        self._rows += rows
        self._visits.append(len(rows))

    def result(self) -> AllreduceCost:
        """The table, on every rank of the group. Collective."""
        time_s, p10_s, p90_s = _quantiles(self.group, self._rows)
        return AllreduceCost(
            algorithm=self.algorithm,
            devices=self.group.size,
            layout=self.layout,
            sizes_bytes=tuple(self.sizes),
            time_s=time_s,
            wire_dtype=self.wire_dtype,
            kind=self.kind,
            relative_uncertainty=_visits_error(self.group, self._rows, self._visits),
            p10_s=p10_s,
            p90_s=p90_s,
        )


class IdleTable(CostTable):
    """How long one allreduce takes at each size with nothing else running.

    The buffer is rewritten before each one, as backward does.
    """

    def _prepare(self) -> None:
        buffers = {size: self.link.allocate(size).view(np.float32) for size in self.sizes}
        self._allreduces = {size: (buffer, self._prepared(buffer)) for size, buffer in buffers.items()}

    def _prepared(self, buffer: Array) -> PersistentAllreduce | _OrderedSum:
        if self.kind == "ordered-sum":
            return _OrderedSum(self.link, buffer)
        return prepare(self.link, buffer, self.algorithm, self.compression, kind=self.kind)

    def visit(self, current: Round) -> None:
        """Reduce each size a few times, in random order; the very first time does not count."""
        rows = [self._each_size(current, turn) for turn in range(_IDLE_SAMPLES)][0 if self._visits else 1 :]
        self._visited(rows)

    def _each_size(self, current: Round, turn: int) -> list[float]:
        """Seconds of one allreduce of each size."""
        seconds = dict.fromkeys(self.sizes, 0.0)
        for size in current.order(self.sizes, turn):
            buffer, allreduce = self._allreduces[size]
            buffer[...] = 1.0
            start_s = _start(self.group, self.link)
            allreduce.run()
            seconds[size] = now() - start_s
        return list(seconds.values())


class _OrderedSum:
    """A sum for which every rank waits, to be run again and again."""

    def __init__(self, link: Transport, buffer: Array) -> None:
        plan = Plan(devices=link.size, global_batch=link.size)
        self._sum, self._buffer = ordered_sum(link, plan_partial_sums(plan)), buffer

    def run(self) -> None:
        self._sum([self._buffer])


class LoadedTable:
    """How long an allreduce takes under a running load, and how much longer the load takes for it.

    The load alone and the load with allreduces alternate; every allreduce ends well before the load does.
    """

    def __init__(self, idle: CostTable, link: Transport, overlap: str, load: Load) -> None:
        self._idle, self._link, self._overlap, self._load = idle, link, overlap, load
        self._intervals_s: list[tuple[float, float]] = []
        self._mechanism = self._progress()
        self._sizes = idle.sizes[::-2][::-1]  # every second size, the largest among them
        self._allreduces: dict[int, list[BucketAllreduce]] = {}
        self._units: dict[int, int] = {}
        self._times: dict[int, list[list[float]]] = {size: [] for size in self._sizes}
        self._losses: dict[int, list[float]] = {size: [] for size in self._sizes}
        self._warm = False

    def _progress(self) -> Progress:
        """What runs the allreduces beside the load, and calls ``_reduced`` for each."""
        return progress(self._link, self._idle.algorithm, self._overlap, self._reduced, self._idle.compression)

    def _reduced(self, bucket: int, size_bytes: int, start_s: float, end_s: float) -> None:
        self._intervals_s.append((start_s, end_s))

    def _allocate(self) -> None:
        """Choose how many allreduces of each size to submit at once, and how long a load that needs."""
        cost = self._idle.result()
        unit_s = max(self._idle.group.allgather(self._load.unit_s))
        for size, idle_s in zip(cost.sizes_bytes, cost.time_s, strict=True):
            if size in self._times:
                count = self._at_once(size, idle_s)
                buffers = [self._link.allocate(size).view(np.float32) for _ in range(count)]
                self._allreduces[size] = [self._mechanism.prepare(buffer, kind=self._idle.kind) for buffer in buffers]
                self._units[size] = math.ceil(2.5 * max(count * idle_s, _LEAST_LOAD_S) / unit_s)

    def _at_once(self, size: int, idle_s: float) -> int:
        """How many allreduces of ``size``, each of which takes about ``idle_s`` alone, are submitted together."""
        return max(1, min(_MOST_AT_ONCE, int(_LOADED_S / max(idle_s, 1e-6))))

    def visit(self) -> None:
        """Run the load without and with allreduces of each size; the very first visit does not count."""
        if not self._units:
            self._allocate()
        group, load, mechanism = self._idle.group, self._load, self._mechanism
        for size in self._sizes:
            count = len(self._allreduces[size])
            _start(group, self._link)
            plain_s = load.run(self._units[size], nothing)
            self._intervals_s.clear()
            start_s = _start(group, self._link)
            for allreduce in self._allreduces[size]:
                mechanism.submit(0, allreduce)
            load.run(self._units[size], mechanism.poll)
            loaded_s = now() - start_s
            mechanism.finish()
            if self._warm:
                self._times[size].append([sum(end - begin for begin, end in self._intervals_s) / count])
                self._losses[size].append((loaded_s - plain_s) / count)
        self._warm = True

    def result(self) -> OverlapCost:
        """The table, on every rank of the group. Collective."""
        group = self._idle.group
        rows = np.column_stack([self._times[size] for size in self._sizes]).tolist()
        time_s, p10_s, p90_s = _quantiles(group, rows)
        lost_s = [self._mean_losses(size) for size in self._sizes]
        losses = [max(0.0, float(np.median(of_size))) for of_size in lost_s]
        return OverlapCost(
            algorithm=self._idle.algorithm,
            devices=group.size,
            layout=self._idle.layout,
            overlap=cast(Literal["poll", "thread"], self._overlap),
            sizes_bytes=tuple(self._sizes),
            time_s=time_s,
            compute_loss_s=tuple(losses),
            wire_dtype=self._idle.wire_dtype,
            kind=self._idle.kind,
            relative_uncertainty=_visits_error(group, rows, [1] * len(rows)),
            loss_relative_uncertainty=_losses_error(lost_s, losses),
            p10_s=p10_s,
            p90_s=p90_s,
        )

    def _mean_losses(self, size: int) -> NDArray[np.float64]:
        """Compute seconds lost in each visit, their mean over the ranks. Collective."""
        mean: NDArray[np.float64] = np.mean(self._idle.group.allgather(self._losses[size]), axis=0)
        return mean

    def close(self) -> None:
        """End the overlap mechanism. Collective."""
        self._mechanism.close()


def _start(group: MPI.Intracomm, link: Transport) -> float:
    """Let all ranks begin at once; the moment."""
    if link.nap_s:
        return quiet_start(group)
    group.Barrier()
    return now()


def _slowest_times(group: MPI.Intracomm, rows: list[list[float]]) -> NDArray[np.float64]:
    """Return the slowest rank's times, none of them shorter than the clock's tick. Collective."""
    slowest: NDArray[np.float64] = np.maximum(np.max(group.allgather(rows), axis=0), TICK_S)
    return slowest


def _quantiles(group: MPI.Intracomm, rows: list[list[float]]) -> list[tuple[float, ...]]:
    """Return the medians, and the 10 % and 90 % quantiles, of the slowest rank's times, one a column. Collective."""
    return [tuple(times_s) for times_s in np.quantile(_slowest_times(group, rows), (0.5, 0.1, 0.9), axis=0).tolist()]


def _visits_error(group: MPI.Intracomm, rows: list[list[float]], visits: list[int]) -> float:
    """The relative standard error of a table's times: root mean square over sizes, from the medians of visits.

    ``visits`` counts the rows of each visit; those of one visit are not independent. Collective.
    """
    slowest = _slowest_times(group, rows)
    edges = np.cumsum([0, *visits])
    medians = np.array([np.median(slowest[a:b], axis=0) for a, b in itertools.pairwise(edges) if b > a])
    return float(np.sqrt(np.mean([median_error(column) ** 2 for column in medians.T])))


def _losses_error(losses_s: list[NDArray[np.float64]], medians_s: list[float]) -> float:
    """The standard error of the compute time lost, over all sizes together, relative to it; at most 1."""
    squares = sum(float(np.var(of_size)) * math.pi / 2 / len(of_size) for of_size in losses_s)
    total = sum(medians_s)
    return min(1.0, math.sqrt(squares) / total) if total > 0 else 1.0
