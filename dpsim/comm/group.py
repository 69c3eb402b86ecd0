"""Groups of ranks, and a barrier that leaves the cores to the ranks that compute."""

from __future__ import annotations

import time

from mpi4py import MPI

_NAP_S = 2e-4


def first_ranks(comm: MPI.Intracomm, devices: int) -> MPI.Intracomm | None:
    """A communicator of the first ``devices`` ranks; None on the others. Collective over ``comm``."""
    group = comm.Split(0 if comm.rank < devices else MPI.UNDEFINED, comm.rank)
    return group if isinstance(group, MPI.Intracomm) and group != MPI.COMM_NULL else None


def quiet_barrier(comm: MPI.Intracomm) -> None:
    """A barrier in which waiting ranks sleep, so that ranks still computing have the cores to themselves."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(_NAP_S)
