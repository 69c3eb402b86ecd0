"""What dpsim needs of a GPU: memory, copies, streams, events. By CuPy on a GPU, by NumPy in numba's simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dpsim.memory import Mark

if TYPE_CHECKING:
    from mpi4py import MPI

    from dpsim.comm.cuda.gemm import Gemm

DeviceArray = Any
"""A CuPy array on a GPU, a NumPy array in the simulator: slices, views and arithmetic read the same."""

PeerMapping = Literal["ipc", "mapped", "simulated"]
"""How a rank's kernels reach another rank's memory: device memory opened by CUDA IPC, host memory that every process
maps and every GPU reads over its bus, or the simulator's shared host memory."""


class Event(Protocol):
    """A point in a stream, and a ``Request`` of ``dpsim.comm.transport``."""

    def done(self) -> bool:
        """Return whether the stream has reached it. Never waits."""

    def due_s(self) -> float | None:
        """Return None: it is not known beforehand."""

    def wait(self) -> None:
        """Return once the stream has reached it."""

    def seconds_since(self, earlier: Event) -> float:
        """Return seconds of the stream between two events that it has reached."""


class Stream(Protocol):
    """Work that a device does in order while the host goes on.

    ``launch`` stands for it in a kernel's launch.
    """

    launch: Any

    def use(self) -> None:
        """Let operations on the calling thread's arrays run in this stream from now on."""

    def record(self) -> Event:
        """Return an event after all the work that the stream has so far."""

    def follow(self, event: Mark) -> None:
        """Make the work that comes later wait for an event of another stream."""

    def wait(self) -> None:
        """Return when all its work is done."""


@dataclass(frozen=True, kw_only=True)
class PeerMemory:
    """Zeroed memory of every rank, equally large, which kernels of all ranks reach; ``ranks[r]`` is rank r's, in bytes.

    ``close`` is collective: no rank's memory is freed before all ranks have closed it.
    """

    ranks: tuple[DeviceArray, ...]
    mapping: PeerMapping
    close: Callable[[], None]


class Device(Protocol):
    """One GPU as one process sees it.

    ``identity`` is equal for two processes that use the same GPU. ``mappings`` are to be tried in this order, the
    fastest first. ``xp`` is the library of its arrays. ``libraries``: what decides its bits besides the model, with
    versions.
    """

    name: str
    identity: str
    simulated: bool
    mappings: tuple[PeerMapping, ...]
    xp: Any
    libraries: str

    def use(self) -> None:
        """Make it the calling thread's device. Every thread that works with it must call this first."""

    def settle(self) -> None:
        """Return when the device has done all work of this process."""

    def stream(self) -> Stream: ...

    def free_bytes(self) -> int:
        """Free device memory in bytes."""

    def memory(self, size_bytes: int) -> DeviceArray:
        """Return zeroed memory of the device, in bytes, an allocation of its own."""

    def host_memory(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return zeroed page-locked host memory, from which copies run while the host goes on."""

    def copy(self, stream: Stream, source: DeviceArray, target: DeviceArray) -> None:
        """Copy contiguous ``source`` to ``target``, as many bytes, in the stream."""

    def upload(self, stream: Stream, host: NDArray[Any], array: DeviceArray) -> None:
        """Copy contiguous ``host`` to ``array`` in the stream."""

    def download(self, stream: Stream, array: DeviceArray, host: NDArray[Any]) -> None:
        """Copy contiguous ``array`` to ``host`` in the stream."""

    def multiply(self, gemm: Gemm, a: DeviceArray, b: DeviceArray, c: DeviceArray) -> None:
        """C = op(A) op(B) in the current stream: bfloat16 codes, added in float32; C is of float32."""

    def share(self, comm: MPI.Intracomm, size_bytes: int, mapping: PeerMapping) -> PeerMemory | None:
        """Return memory that kernels of all ranks of a node reach; None on all ranks if there is none. Collective."""
