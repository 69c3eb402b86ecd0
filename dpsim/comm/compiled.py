"""Kernels are compiled before the first step, by one rank of each node for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpi4py import MPI

from dpsim.comm.group import quiet_barrier


def compile_once(warm_up: Callable[[], object], comm: MPI.Intracomm) -> None:
    """``warm_up`` what needs kernels on each node's first rank, then on the others, which find everything compiled.

    Waiting ranks sleep instead of spinning. Collective over ``comm``.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    for turn in (node.rank == 0, node.rank > 0):
        if turn:
            warm_up()
        quiet_barrier(comm)
    node.Free()


def compile_among(rehearsals: Sequence[Callable[[], object]], comm: MPI.Intracomm) -> None:
    """The same for several rehearsals, of which each rank of a node compiles some; then all run all. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    for mine in (rehearsals[node.rank :: node.size], rehearsals):
        for warm_up in mine:
            warm_up()
        quiet_barrier(comm)
    node.Free()
