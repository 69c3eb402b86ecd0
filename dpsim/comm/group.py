"""Groups of ranks, and a barrier that leaves the cores to the ranks that compute."""

from __future__ import annotations

import time
from collections.abc import Container

import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now, sleep_until

_NAP_S, _LONG_NAP_S = 2e-4, 2e-2
_LEAD_S = 2e-3


def first_ranks(comm: MPI.Intracomm, devices: int) -> MPI.Intracomm | None:
    """Return a communicator of the first ``devices`` ranks; None on the others. Collective over ``comm``."""
    return group_of(comm, range(devices))


def group_of(comm: MPI.Intracomm, ranks: Container[int]) -> MPI.Intracomm | None:
    """Return a communicator of some ranks, in their order; None on the others. Collective over ``comm``."""
    group = comm.Split(0 if comm.rank in ranks else MPI.UNDEFINED, comm.rank)
    return group if isinstance(group, MPI.Intracomm) and group != MPI.COMM_NULL else None


def class_group(comm: MPI.Intracomm, number: int) -> MPI.Intracomm:
    """Return a communicator of the ranks that give the same number, in their order. Collective over ``comm``."""
    group = comm.Split(number, comm.rank)
    assert isinstance(group, MPI.Intracomm)
    return group


def quiet_barrier(comm: MPI.Intracomm) -> None:
    """Wait for all ranks, asleep, so that ranks still computing have the cores to themselves."""
    _sleep_through(comm.Ibarrier())


def quiet_receive(comm: MPI.Intracomm, source: int = 0) -> None:
    """Sleep until ``source`` has sent an empty message: for long, so that many waiting ranks leave the cores alone."""
    _sleep_through(comm.Irecv([bytearray(), MPI.BYTE], source=source), _LONG_NAP_S)


def quiet_start(comm: MPI.Intracomm) -> float:
    """Sleep until a moment that all ranks have agreed on, and return it. More ranks than cores can begin at once so."""
    quiet_barrier(comm)
    moment = np.array([now() + _LEAD_S])
    _sleep_through(comm.Ibcast(moment, root=0))
    sleep_until(moment[0])
    return float(moment[0])


def _sleep_through(request: MPI.Request, nap_s: float = _NAP_S) -> None:
    while not request.Test():
        time.sleep(nap_s)
