"""How much longer a stand-in for computation takes on several ranks at once than on one, and the scatter of both."""

from __future__ import annotations

import math

from mpi4py import MPI

from dpsim.comm.clock import now
from dpsim.comm.group import first_ranks, quiet_barrier
from dpsim.harness.calibrate.load import StandIn, nothing
from dpsim.harness.measurement.scatter import Visits, compute_slowdown, later_error
from dpsim.machine import ComputeSlowdown

_LEAST_LOAD_S = 1e-3


class ComputeContention:
    """How much longer the stand-in takes on the slowest of several ranks than on rank 0 alone; the two alternate."""

    def __init__(self, comm: MPI.Intracomm, devices: int) -> None:
        self._load = StandIn()
        self._groups = {count: first_ranks(comm, count) for count in (1, devices)}
        self._visits = {count: Visits() for count in self._groups}
        self._comm, self._devices = comm, devices

    def visit(self) -> None:
        """Run the stand-in on rank 0 alone, then on all ranks of the group."""
        for count, group in self._groups.items():
            quiet_barrier(self._comm)
            if group is not None:
                load_s = self._load.run(math.ceil(_LEAST_LOAD_S / self._load.unit_s), nothing)
                self._visits[count].add([group.allreduce(load_s, MPI.MAX)], now())

    def result(self) -> ComputeSlowdown:
        """The slowdown, on rank 0; 1 on the other ranks, which did not compute alone."""
        if self._comm.rank:
            return ComputeSlowdown(devices=self._devices, factor=1.0)
        return compute_slowdown(self._devices, self._visits[1], self._visits[self._devices])

    def relative_uncertainty(self) -> float:
        """Return one standard error of the mean of the stand-in's times over a later stretch, relative."""
        return later_error(list(self._visits.values()))
