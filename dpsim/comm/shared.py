"""Memory that several processes of a machine share. It has no name in a file system, so nothing can be left behind."""

from __future__ import annotations

import mmap
import os
from typing import Any, Protocol


class Node(Protocol):
    """The processes of one machine, which can tell each other Python's values: a communicator of MPI's is one."""

    @property
    def rank(self) -> int: ...

    def bcast(self, value: Any, /) -> Any:
        """Return the value of rank 0."""

    def allgather(self, value: Any, /) -> list[Any]:
        """Return the values of all ranks."""


def shared_memory(node: Node, size_bytes: int, name: str) -> mmap.mmap | None:
    """Return zeroed memory that all ranks of a node share; None on all of them where the system refuses it. Collective.

    ``name`` is shown in ``/proc``.
    """
    handle = _created(size_bytes, name) if node.rank == 0 else -1
    path: str = node.bcast(f"/proc/{os.getpid()}/fd/{handle}")
    memory: mmap.mmap | None = None
    try:
        if node.rank:
            handle = os.open(path, os.O_RDWR)
        if handle >= 0:  # mmap takes -1 for memory of this process alone
            memory = mmap.mmap(handle, size_bytes)
    except OSError:
        pass  # all ranks learn of it below
    everywhere = all(node.allgather(memory is not None))
    if handle >= 0:
        os.close(handle)
    return memory if everywhere else None


def _created(size_bytes: int, name: str) -> int:
    """Return a descriptor of new memory; -1 where the system or a limit on files refuses it."""
    try:
        handle = os.memfd_create(name)
    except OSError:
        return -1
    try:
        os.ftruncate(handle, size_bytes)
    except OSError:
        os.close(handle)
        return -1
    return handle
