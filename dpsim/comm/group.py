"""Groups of ranks, and what they do together: quiet barriers, and kernels that are compiled once a node."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now, sleep_until
from dpsim.errors import DpsimError

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


def quiet_receive(comm: MPI.Intracomm) -> None:
    """Sleep until rank 0 has sent an empty message: for long, so that many waiting ranks leave the cores alone."""
    _sleep_through(comm.Irecv([bytearray(), MPI.BYTE], source=0), _LONG_NAP_S)


def quiet_start(comm: MPI.Intracomm) -> float:
    """Sleep until a moment that all ranks have agreed on, and return it. More ranks than cores can begin at once so."""
    quiet_barrier(comm)
    moment = np.array([now() + _LEAD_S])
    _sleep_through(comm.Ibcast(moment, root=0))
    sleep_until(moment[0])
    return float(moment[0])


def start_together(comm: MPI.Intracomm, *, asleep: bool) -> float:
    """Let all ranks begin at once, and return when they were to. Collective. ``asleep``: see ``quiet_start``."""
    if asleep:
        return quiet_start(comm)
    comm.Barrier()
    return now()


def _sleep_through(request: MPI.Request, nap_s: float = _NAP_S) -> None:
    while not request.Test():
        time.sleep(nap_s)


def compile_once(warm_up: Callable[[], object], comm: MPI.Intracomm) -> None:
    """Call ``warm_up`` on each node's first rank, then on the others, which find every kernel compiled.

    Waiting ranks sleep instead of spinning. Collective over ``comm``: a ``DpsimError`` of one rank is raised by all.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = node.rank == 0
    node.Free()
    for turn in (first, not first):
        _together([warm_up] if turn else [], comm)


def compile_among(warm_ups: Sequence[Callable[[], object]], comm: MPI.Intracomm) -> None:
    """Compile several ``warm_ups``: each rank of a node calls its share of them, then all of them. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    share = warm_ups[node.rank :: node.size]
    node.Free()
    for mine in (share, warm_ups):
        _together(mine, comm)


def _together(warm_ups: Iterable[Callable[[], object]], comm: MPI.Intracomm) -> None:
    """Call this rank's ``warm_ups``. If one of them is refused on any rank, all ranks raise, so that none waits."""
    error: DpsimError | None = None
    try:
        for warm_up in warm_ups:
            warm_up()
    except DpsimError as refused:
        error = refused
    quiet_barrier(comm)
    errors = [each for each in comm.allgather(error) if each is not None]
    if errors:
        raise error or errors[0]
