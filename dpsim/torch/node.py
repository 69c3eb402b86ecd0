"""Buckets of gradients in memory that the ranks of a ``torch.distributed`` group share, and the sum over them there.

The ranks agree through the process group, so it does not matter who started them. DDP's own bucket is moved to shared
memory once, and gradients are then produced where they are reduced. No memory keeps a name in a file system, so nothing
is left behind by ranks that are killed.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import select
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed

from dpsim.comm.shared import shared_memory
from dpsim.errors import CommunicationError, ConfigError
from dpsim.kernels.allreduce.cpu import Reduction, SharedGroup
from dpsim.kernels.allreduce.registry import find
from dpsim.kernels.allreduce.tree import slots

_IN_PLACE = {torch.float32, torch.float64}
SUMMED = _IN_PLACE | {torch.bfloat16, torch.float16}
"""Dtypes of gradients that can be reduced. Those of 16 bits are added in float32, and rounded once."""
_TMPFS = "/dev/shm"


class Ranks:
    """A process group of ``torch.distributed``, as far as the agreement on shared memory needs it."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank: int = distributed.get_rank(group)
        self.size: int = distributed.get_world_size(group)

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Collective."""
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self._group)
        return values

    def bcast(self, value: Any) -> Any:
        """Return the value of rank 0. Collective."""
        return self.allgather(value)[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedBucket:
    """A bucket of DDP's, and the prepared mean over all ranks.

    ``shared`` is the memory that is reduced, as a flat tensor: the bucket itself, or a copy of it where its memory
    cannot be shared or has 16-bit numbers.
    """

    bucket: torch.Tensor
    shared: torch.Tensor
    mean: Reduction

    def fill(self) -> None:
        """Copy the bucket to where it is reduced, if that is elsewhere."""
        if self.shared is not self.bucket:
            self.shared.copy_(self.bucket)

    def result(self) -> torch.Tensor:
        """Return the mean, in the bucket's dtype."""
        return self.shared if self.shared.dtype == self.bucket.dtype else self.bucket.copy_(self.shared)


class SharedNode:
    """The ranks of a group, which are all on one machine. They prepare and run the same buckets in the same order."""

    def __init__(self, ranks: Ranks, control: mmap.mmap) -> None:
        self.ranks = ranks
        self._ended = select.poll()
        self._rank_of = {os.pidfd_open(pid): rank for rank, pid in enumerate(ranks.allgather(os.getpid()))}
        for handle in self._rank_of:
            self._ended.register(handle, select.POLLIN)
        threads = ranks.size * torch.get_num_threads()
        self._group = SharedGroup(
            ranks.rank,
            ranks.size,
            np.frombuffer(control, np.uint8),
            oversubscribed=threads > (os.cpu_count() or 1),
            on_long_wait=self.check_ranks,
        )

    @classmethod
    def open(cls, ranks: Ranks) -> SharedNode | None:
        """Return the node of these ranks; None on all of them unless they can share memory. Collective."""
        control = shared_memory(ranks, SharedGroup.control_bytes(ranks.size), "dpsim-group")
        return None if control is None else cls(ranks, control)

    def check_ranks(self) -> None:
        """Raise ``CommunicationError`` if a rank has ended, for which this one would wait forever."""
        os.sched_yield()
        for handle, _ in self._ended.poll(0):
            raise CommunicationError(
                f"rank {self._rank_of[handle]} has ended while rank {self.ranks.rank} waits for its gradients",
                remedy="see what that rank has printed; the cause is there",
            )

    def prepare(self, bucket: torch.Tensor, wire_dtype: str | None) -> SharedBucket | None:
        """Prepare the mean of a bucket over all ranks; None on all of them where no memory can be had. Collective.

        Raises ``ConfigError`` for a bucket of float64 with a ``wire_dtype``.
        """
        if wire_dtype is not None and bucket.dtype == torch.float64:
            raise ConfigError(
                f"gradients in float64 with wire_dtype {wire_dtype}",
                allowed="gradients in float32, bfloat16 or float16",
                remedy="leave wire_dtype out, or convert the model with float()",
            )
        arrays = self._in_place(bucket) if bucket.dtype in _IN_PLACE else None
        shared = bucket
        if arrays is None:
            dtype = np.float64 if bucket.dtype == torch.float64 else np.float32
            arrays = self._copies(bucket.numel(), np.dtype(dtype))
            if arrays is None:
                return None
            shared = torch.from_numpy(arrays[self.ranks.rank])
        make = functools.partial(find("cpu", "two-shot").make, scale=1 / self.ranks.size)
        # the sum is no larger on the wire than its largest number, which float16 could hold
        codes = (wire_dtype, 2.0 ** -(self.ranks.size - 1).bit_length()) if wire_dtype is not None else None
        mean = make(self._group, arrays, slots(range(self.ranks.size + 1)), compression=codes)
        return SharedBucket(bucket=bucket, shared=shared, mean=mean)

    def _in_place(self, bucket: torch.Tensor) -> list[Any] | None:
        """Move the bucket to shared memory; return every rank's, or None on all ranks if there is no room."""
        storage = bucket.untyped_storage()
        system = os.statvfs(_TMPFS) if os.path.isdir(_TMPFS) else None
        room = system is not None and system.f_bavail * system.f_frsize > 2 * self.ranks.size * storage.nbytes()
        if not all(self.ranks.allgather(room)):
            return None
        location = "", 0, 0
        with contextlib.suppress(RuntimeError):  # PyTorch's for every failure; all ranks learn of it
            handle, size_bytes = storage._share_fd_cpu_()
            location = f"/proc/{os.getpid()}/fd/{handle}", size_bytes, bucket.storage_offset() * bucket.element_size()
        arrays = []
        with contextlib.suppress(OSError):
            for rank, each in enumerate(self.ranks.allgather(location)):
                arrays.append(bucket.numpy() if rank == self.ranks.rank else _mapped(bucket, *each))
        return arrays if all(self.ranks.allgather(len(arrays) == self.ranks.size)) else None

    def _copies(self, elements: int, dtype: np.dtype[Any]) -> list[Any] | None:
        """Return new shared memory for a copy of every rank's bucket; None on all ranks where the system refuses it."""
        extent = -(-elements * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = shared_memory(self.ranks, extent * self.ranks.size, "dpsim-gradients")
        if memory is None:
            return None
        return [np.frombuffer(memory, dtype, elements, rank * extent) for rank in range(self.ranks.size)]


def _mapped(like: torch.Tensor, path: str, size_bytes: int, offset_bytes: int) -> Any:
    """Return another rank's bucket, which is like this one's. Raises ``OSError``."""
    handle = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(handle, size_bytes)
    finally:
        os.close(handle)
    return np.frombuffer(memory, like.numpy().dtype, like.numel(), offset_bytes)
