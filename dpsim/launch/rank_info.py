"""Which of how many ranks this process is: started by dpsim, by ``mpiexec`` or ``srun``, or alone (rank 0 of 1).

Nothing here loads MPI as long as the launcher's variables tell.
"""

from __future__ import annotations

import functools
import os
import sys

from dpsim.launch import jobs


def rank() -> int:
    """This process's number among all ranks, from 0."""
    return _place()[0]


def size() -> int:
    """How many ranks there are."""
    return _place()[1]


def local_rank() -> int:
    """This process's number among the ranks of its node, from 0.

    Where the launcher does not tell (``srun``), the first call of ``local_rank`` or ``local_size`` is collective.
    """
    return _local_place()[0]


def local_size() -> int:
    """How many ranks there are on this node; collective as ``local_rank`` is."""
    return _local_place()[1]


def _place() -> tuple[int, int]:
    here = jobs.job()
    if "mpi4py.MPI" not in sys.modules:
        if here is None:
            return 0, 1
        if here.size is not None:
            return here.rank, here.size
    from dpsim.launch import worker

    world = worker.world()
    return world.rank, world.size


def _local_place() -> tuple[int, int]:
    for rank_key, size_key in (
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ):
        texts = os.environ.get(rank_key, ""), os.environ.get(size_key, "")
        if all(text.isdecimal() for text in texts):
            return int(texts[0]), int(texts[1])
    return (0, 1) if _place()[1] == 1 else _measured_local_place()


@functools.cache
def _measured_local_place() -> tuple[int, int]:
    from mpi4py import MPI

    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    found = node.rank, node.size
    node.Free()
    return found
