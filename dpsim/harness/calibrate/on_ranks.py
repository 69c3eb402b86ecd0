"""Calibrates a network on running ranks: its allreduces, idle and under load, and how much computation slows down."""

from __future__ import annotations

import math
from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.algorithms import ALGORITHMS
from dpsim.collective import CollectiveKind
from dpsim.comm.group import first_ranks, quiet_barrier
from dpsim.comm.networks import transport
from dpsim.comm.selection import select
from dpsim.harness.calibrate.calibrate import CalibrateConfig
from dpsim.harness.calibrate.contention import ComputeContention
from dpsim.harness.calibrate.load import Load, ReplicaLoad, StandIn
from dpsim.harness.calibrate.tables import IdleTable, LoadedTable
from dpsim.harness.measurement.loop import Round, StopRule, rounds
from dpsim.harness.measurement.scatter import NARROW
from dpsim.layout import node_counts
from dpsim.machine import Network, Selection
from dpsim.predict.cost import ORDERED_SUM_ALGORITHM
from dpsim.progress import Progress

_LEAST_ROUNDS, _MOST_ROUNDS = 5, 60
_KINDS: dict[str, tuple[CollectiveKind, ...]] = {
    "data-parallel": ("allreduce",),
    "zero1": ("allreduce", "reduce-scatter", "all-gather"),
}
"""The collectives that a strategy's calibration measures. Parameters are gathered when nothing else runs."""


def until_settled(seconds: float, most_rounds: float = math.inf) -> StopRule:
    """Measure for ``seconds``, and for up to twice as long until the measurement is settled."""
    return StopRule(least_rounds=_LEAST_ROUNDS, least_s=seconds, most_s=2 * seconds, most_rounds=most_rounds)


class NetworkCalibrator:
    """Measures the tables of one network, round by round. Collective over ``comm``."""

    def __init__(self, comm: MPI.Intracomm, config: CalibrateConfig) -> None:
        self._comm = comm
        network = Network.parse(config.network)
        self._idle: list[IdleTable] = []
        self._loaded: list[LoadedTable] = []
        self._selection: dict[int, Selection] = {}
        counts = dict.fromkeys(devices for devices, _ in config.layouts())
        emulated = config.workload is not None
        self._contention = [ComputeContention(comm, devices) for devices in counts if not emulated]
        for devices, layout in config.layouts():
            devices_per_node = node_counts(layout, devices)[1]
            group = first_ranks(comm, devices)
            for algorithm in config.algorithms:
                if group is None:
                    continue
                selection = self._select(group) if algorithm == "auto" else None
                link = transport(group, network, devices_per_node, selection, sleeps=emulated)
                load = _load(config)
                halves = ALGORITHMS.find(algorithm).halves
                for kind in _KINDS[config.strategy if halves else "data-parallel"]:
                    table = IdleTable(group, link, algorithm, layout, config, kind)
                    self._idle.append(table)
                    for overlap in config.overlaps if kind != "all-gather" else ():
                        beside = transport(group, network, devices_per_node, selection, sleeps=emulated)
                        self._loaded.append(LoadedTable(table, beside, overlap, load))
            if config.sums and group is not None:
                link = transport(group, network, devices_per_node, sleeps=emulated)
                table = IdleTable(group, link, ORDERED_SUM_ALGORITHM, layout, config, "ordered-sum")
                self._idle.append(table)
            quiet_barrier(comm)

    def _select(self, group: MPI.Intracomm) -> Selection:
        """The algorithms that ``auto`` stands for on so many devices, measured once."""
        if group.size not in self._selection:
            self._selection[group.size] = select(group) or Selection.usual(group.size)
        return self._selection[group.size]

    def visit(self, current: Round) -> None:
        """Take a few more samples of every table."""
        for idle in self._idle:
            idle.visit(current)
        for loaded in self._loaded:
            loaded.visit()
        quiet_barrier(self._comm)
        for contention in self._contention:
            contention.visit()

    def settled(self) -> bool:
        """Whether every compute slowdown is known well enough; on rank 0."""
        return all(c.result().half_width <= NARROW for c in self._contention)

    def result(self) -> dict[str, Any] | None:
        """The tables as plain values, on rank 0."""
        idle = [table.result() for table in self._idle]
        tables = {
            "allreduce": [table for table in idle if table.kind == "allreduce"],
            "halves": [table for table in idle if table.kind != "allreduce"],
            "overlap": [table.result() for table in self._loaded],
            "selection": list(self._selection.values()),
            "compute_slowdown": [contention.result() for contention in self._contention],
        }
        for table in self._loaded:
            table.close()
        if self._comm.rank:
            return None
        errors = [contention.relative_uncertainty() for contention in self._contention[-1:]]
        return dict(codec.to_builtins(tables)) | {"relative_uncertainty": errors[0] if errors else None}


def _load(config: CalibrateConfig) -> Load:
    """The computation under which allreduces are measured."""
    if not config.model:
        return StandIn()
    return ReplicaLoad(config.model, config.dataset, config.local_batch, config.workload, config.compute_dtype)


def calibrate_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """The calibration of one ``CalibrateConfig`` on running ranks; rank 0 returns its tables (plain values)."""
    config = codec.decode(argument, CalibrateConfig, "calibration")
    counts = " and ".join(layout or str(devices) for devices, layout in config.layouts())
    report(
        f"calibrating {', '.join(config.algorithms)} on {counts} devices, network {config.network}: {config.seconds:g}"
        f" s, up to {2 * config.seconds:g} s until compute slowdowns are known to {NARROW:.0%}"
    )
    calibrator = NetworkCalibrator(comm, config)
    stop = until_settled(config.seconds, most_rounds=_MOST_ROUNDS)
    for current in rounds(stop, suffice=calibrator.settled, comm=comm, report=report):
        calibrator.visit(current)
    return calibrator.result()
