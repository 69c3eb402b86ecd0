"""Kernels are compiled before the first step, by one rank of each node for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mpi4py import MPI

from dpsim.comm.group import quiet_barrier
from dpsim.errors import DpsimError


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
