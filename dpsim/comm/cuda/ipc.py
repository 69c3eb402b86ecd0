"""GPU memory that several processes reach: device memory by CUDA IPC, or host memory mapped into every GPU.

A handle from CUDA IPC names an allocation, so the offset in it is sent along. A process cannot open its own handle; it
uses its own memory directly. A barrier makes sure that memory is freed only after every process has closed it.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from cuda.bindings import driver

from dpsim.comm.cuda.device import DeviceArray, PeerMemory
from dpsim.comm.shared import shared_memory
from dpsim.errors import CommunicationError

if TYPE_CHECKING:
    from mpi4py import MPI

_runtime = cupy.cuda.runtime
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


def checked(returned: tuple[Any, ...]) -> Any:
    """Return the values that a call of the CUDA driver returned with its status. Raises ``CommunicationError``."""
    status, *values = returned
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CommunicationError(f"the CUDA driver answers {status.name}", remedy="look at nvidia-smi and dmesg")
    return values[0] if len(values) == 1 else tuple(values)


def _array(pointer: int, size_bytes: int, owner: object, device: int) -> DeviceArray:
    memory = cupy.cuda.UnownedMemory(pointer, size_bytes, owner, device)
    return cupy.ndarray((size_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))


def share_device_memory(comm: MPI.Intracomm, own: DeviceArray, device: int) -> PeerMemory | None:
    """Share the memory ``own`` of every rank by CUDA IPC; return None on all ranks if one cannot open another's."""
    base = int(checked(driver.cuMemGetAddressRange(own.data.ptr))[0])
    try:
        handle = _runtime.ipcGetMemHandle(base)
    except _runtime.CUDARuntimeError:
        handle = None
    handles = comm.allgather((handle, own.data.ptr - base))
    opened: list[int] = []
    ranks: list[DeviceArray] = []
    for rank, (handle, offset) in enumerate(handles):
        if rank == comm.rank:
            ranks.append(own)
            continue
        if handle is None:
            break
        try:
            opened.append(_runtime.ipcOpenMemHandle(handle))
        except _runtime.CUDARuntimeError:
            break
        ranks.append(_array(opened[-1] + offset, own.nbytes, own, device))

    def close() -> None:
        _runtime.deviceSynchronize()
        for pointer in opened:
            _runtime.ipcCloseMemHandle(pointer)
        comm.Barrier()  # the owner's array keeps its memory until after this

    if not all(comm.allgather(len(ranks) == comm.size)):
        close()
        return None
    return PeerMemory(ranks=tuple(ranks), mapping="ipc", close=close)


def share_mapped_memory(comm: MPI.Intracomm, size_bytes: int, device: int) -> PeerMemory | None:
    """Allocate host memory with a part for each rank, which every rank's GPU reads and writes over its bus."""
    extent = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = shared_memory(comm, extent * comm.size, "dpsim-mapped")
    if memory is None:
        return None
    mapped = np.frombuffer(memory, np.uint8)
    registered = True
    try:
        _runtime.hostRegister(mapped.ctypes.data, mapped.nbytes, _PORTABLE | _MAPPED)
    except _runtime.CUDARuntimeError:
        registered = False

    def close() -> None:
        _runtime.deviceSynchronize()
        if registered:
            _runtime.hostUnregister(mapped.ctypes.data)
        comm.Barrier()

    if not all(comm.allgather(registered)):
        close()
        return None
    first = int(checked(driver.cuMemHostGetDevicePointer(mapped.ctypes.data, 0)))
    ranks = tuple(_array(first + rank * extent, size_bytes, mapped, device) for rank in range(comm.size))
    return PeerMemory(ranks=ranks, mapping="mapped", close=close)
