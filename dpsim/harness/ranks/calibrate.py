"""Measures allreduces on running ranks: alone, and beside a computation that they slow and that slows them."""

from __future__ import annotations

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
from dpsim.comm.transport import Transport, transport
from dpsim.harness.calibrate import CalibrateConfig
from dpsim.harness.ranks.load import Load, ReplicaLoad, StandIn
from dpsim.machine import AllreduceCost, ComputeSlowdown, Network, OverlapCost

Progress = Callable[[str], None]
_LEAST_LOAD_S = 1e-3
_SMALLEST_BYTES, _FACTOR = 1024, 4


def sizes(max_bytes: int) -> list[int]:
    """4 B, then 1 KiB and up by a factor of 4, ending at ``max_bytes`` (a multiple of 4)."""
    points = [4]
    size = _SMALLEST_BYTES
    while size < max_bytes:
        points.append(size)
        size *= _FACTOR
    if max_bytes > points[-1]:
        points.append(max_bytes // 4 * 4)
    return points


def calibrate_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """The calibration of one ``CalibrateConfig`` on running ranks; rank 0 returns its tables (plain values)."""
    config = codec.decode(argument, CalibrateConfig, "calibration")
    network = Network.parse(config.network)
    alone: list[AllreduceCost] = []
    beside: list[OverlapCost] = []
    for devices in sorted(d for d in config.devices if d > 1):
        group = first_ranks(comm, devices)
        if group is not None:
            for algorithm in config.algorithms:
                report(f"calibrating {algorithm} on {devices} devices, network {config.network}")
                link = transport(group, network)
                table = _alone(group, link, algorithm, config)
                alone.append(table)
                for overlap in config.overlaps:
                    beside.append(_beside(group, link, algorithm, overlap, table, config))
        quiet_barrier(comm)
    slowdown = [_crowded(comm, devices) for devices in sorted(config.devices) if devices > 1 and not config.model]
    tables = {"allreduce": alone, "overlap": beside, "compute_slowdown": slowdown}
    return {name: codec.to_builtins(table) for name, table in tables.items()} if comm.rank == 0 else None


def _crowded(comm: MPI.Intracomm, devices: int) -> ComputeSlowdown:
    """How much longer the load takes on ``devices`` ranks at once than on rank 0 alone; the two alternate."""
    load: Load = StandIn()
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(15):
        for together in (False, True):
            quiet_barrier(comm)
            if comm.rank < (devices if together else 1):
                times[together].append(load.run(math.ceil(_LEAST_LOAD_S / load.unit_s), lambda: None))
    ratio = statistics.median(times[True]) / statistics.median(times[False]) if comm.rank == 0 else 1.0
    return ComputeSlowdown(devices=devices, factor=ratio)


def _slowest(group: MPI.Intracomm, samples: dict[int, list[float]]) -> dict[int, float]:
    """Median over repeats of the slowest rank's time."""
    return {
        key: statistics.median(max(row) for row in zip(*group.allgather(times), strict=True))
        for key, times in samples.items()
    }


def _alone(group: MPI.Intracomm, link: Transport, algorithm: str, config: CalibrateConfig) -> AllreduceCost:
    """Time of one allreduce at each size with nothing else running.

    The buffer is rewritten before each one, as backward does.
    """
    points = sizes(config.max_bytes)
    buffers = {size: link.allocate(size).view(np.float32) for size in points}
    samples: dict[int, list[float]] = {size: [] for size in points}
    random = np.random.default_rng(0)
    end_s = now() + config.seconds / (1 + len(config.overlaps))
    repeats = 0
    while repeats < 5 or (repeats < 60 and group.bcast(now() < end_s)):
        for index in random.permutation(len(points)):
            size = points[index]
            buffers[size][...] = 1.0
            group.Barrier()
            start_s = now()
            allreduce(link, buffers[size], algorithm)
            samples[size].append(now() - start_s)
        repeats += 1
    cost = _slowest(group, {size: times[1:] for size, times in samples.items()})
    return AllreduceCost(
        algorithm=algorithm, devices=group.size, sizes_bytes=tuple(points), time_s=tuple(cost[size] for size in points)
    )


def _beside(
    group: MPI.Intracomm, link: Transport, algorithm: str, overlap: str, alone: AllreduceCost, config: CalibrateConfig
) -> OverlapCost:
    """Allreduces under a running load: how long each takes, and how much longer the load takes for each.

    The load and the load with allreduces alternate; every allreduce ends well before the load does.
    """
    load: Load = ReplicaLoad(config.model, config.dataset, config.local_batch) if config.model else StandIn()
    done: list[tuple[float, float]] = []

    def finished(bucket: int, size_bytes: int, start_s: float, end_s: float) -> None:
        done.append((start_s, end_s))

    mechanism = progress(link, algorithm, overlap, finished)
    points = alone.sizes_bytes[-1::-2][::-1]  # every second size, the largest among them
    times: dict[int, list[float]] = {size: [] for size in points}
    losses: dict[int, list[float]] = {size: [] for size in points}
    end_s = now() + config.seconds / (1 + len(config.overlaps))
    repeats = 0
    while repeats < 4 or (repeats < 40 and group.bcast(now() < end_s)):
        for size, solo_s in zip(alone.sizes_bytes, alone.time_s, strict=True):
            if size not in times:
                continue
            many = max(1, min(20, int(4e-3 / max(solo_s, 1e-6))))
            units = math.ceil(2.5 * max(many * solo_s, _LEAST_LOAD_S) / load.unit_s)
            buffers = [link.allocate(size).view(np.float32) for _ in range(many)]
            group.Barrier()
            plain_s = load.run(units, _nothing)
            group.Barrier()
            done.clear()
            start_s = now()
            for buffer in buffers:
                mechanism.submit(0, buffer)
            load.run(units, mechanism.poll)
            loaded_s = now() - start_s
            mechanism.finish()
            if repeats:
                times[size].append(sum(end - begin for begin, end in done) / many)
                losses[size].append((loaded_s - plain_s) / many)
        repeats += 1
    mechanism.close()
    beside = _slowest(group, times)
    loss = {size: max(0.0, float(np.median(np.mean(group.allgather(losses[size]), axis=0)))) for size in points}
    return OverlapCost(
        algorithm=algorithm, devices=group.size, overlap=cast(Literal["poll", "thread"], overlap),
        sizes_bytes=tuple(points), time_s=tuple(beside[size] for size in points),
        compute_loss_s=tuple(loss[size] for size in points),
    )  # fmt: skip


def _nothing() -> None:
    pass
