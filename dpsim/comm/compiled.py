"""Kernels are compiled before the first step, by one rank of each node for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpi4py import MPI

from dpsim.comm.group import quiet_barrier


def compile_once(warm_up: Callable[[], object], comm: MPI.Intracomm) -> None:
    """Call ``warm_up`` on each node's first rank, then on the others, which find every kernel compiled.

    Waiting ranks sleep instead of spinning. Collective over ``comm``.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    for turn in (node.rank == 0, node.rank > 0):
        if turn:
            warm_up()
        quiet_barrier(comm)
    node.Free()


def compile_among(warm_ups: Sequence[Callable[[], object]], comm: MPI.Intracomm) -> None:
    """The same for several ``warm_ups``: each rank of a node calls its share of them, then all of them. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    for share in (warm_ups[node.rank :: node.size], warm_ups):
        for warm_up in share:
            warm_up()
        quiet_barrier(comm)
    node.Free()
