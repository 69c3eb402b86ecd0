"""Memory that several processes of a machine see. It has no name in a file system, so nothing can be left behind."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI


def shared_memory(node: MPI.Intracomm, size_bytes: int, name: str) -> mmap.mmap | None:
    """Zeroed memory that all ranks of a node see; None, on all of them, where that cannot be had. Collective.

    ``name`` is only for who looks into ``/proc``.
    """
    handle = -1
    if node.rank == 0:
        handle = os.memfd_create(name)
        os.ftruncate(handle, size_bytes)
    path: str = node.bcast(f"/proc/{os.getpid()}/fd/{handle}")
    memory: mmap.mmap | None = None
    try:
        mine = handle if handle >= 0 else os.open(path, os.O_RDWR)
        memory = mmap.mmap(mine, size_bytes)
    except OSError:
        mine = handle
    everywhere = all(node.allgather(memory is not None))
    if mine >= 0:
        os.close(mine)
    return memory if everywhere else None
