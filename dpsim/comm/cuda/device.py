"""What dpsim asks of a GPU: memory, copies, streams, events. CuPy gives it on a GPU, NumPy in numba's simulator."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

DeviceArray = Any
"""A CuPy array on a GPU, a NumPy array in the simulator: slices, views and arithmetic read the same."""

Way = Literal["ipc", "mapped", "simulated"]
"""How a rank's kernels reach another rank's memory: device memory opened by CUDA IPC, host memory that every process
maps and every GPU reads over its bus, or the simulator's shared host memory."""


class Event(Protocol):
    """A point in a stream. It is a ``Request`` of ``dpsim.comm.transport`` too."""

    def done(self) -> bool:
        """Whether the stream has come to it; never waits."""

    def due_s(self) -> float | None:
        """Not known beforehand."""

    def wait(self) -> None:
        """Return once the stream has come to it."""

    def seconds_since(self, earlier: Event) -> float:
        """Seconds of the stream between two events that it has come to."""


class Stream(Protocol):
    """Work that a device does in order, beside what the host does meanwhile.

    ``launch`` is what a kernel's launch takes for it.
    """

    launch: Any

    def record(self) -> Event:
        """An event behind all that the stream was given so far."""

    def follow(self, event: Event) -> None:
        """What the stream is given from now on waits for an event of another stream."""

    def wait(self) -> None:
        """Return when it has nothing left to do."""


@dataclass(frozen=True, kw_only=True)
class PeerMemory:
    """As much memory of every rank, zeroed, which kernels of every rank reach; ``ranks[r]`` is rank r's, in bytes.

    ``close`` is collective: nobody's memory is freed before everybody has closed it.
    """

    ranks: tuple[DeviceArray, ...]
    way: Way
    close: Callable[[], None]


class Device(Protocol):
    """One GPU as one process sees it.

    ``identity`` is equal for two processes that use the same one. ``ways`` are those to try in this order, the best
    first. ``xp`` is the array library of its arrays.
    """

    name: str
    identity: str
    simulated: bool
    ways: tuple[Way, ...]
    xp: Any

    def use(self) -> None:
        """Make it the calling thread's device. Every thread that works with it calls this first."""

    def settle(self) -> None:
        """Return when the device has done all that this process gave it."""

    def stream(self) -> Stream: ...

    def free_bytes(self) -> int:
        """Memory that is still to be had."""

    def memory(self, size_bytes: int) -> DeviceArray:
        """Zeroed memory of the device, in bytes, an allocation of its own."""

    def host_memory(self, size_bytes: int) -> NDArray[np.uint8]:
        """Zeroed host memory from which copies run beside the host's work (page-locked)."""

    def copy(self, stream: Stream, source: DeviceArray, target: DeviceArray) -> None:
        """Copy contiguous ``source`` to ``target``, as many bytes, in the stream."""

    def upload(self, stream: Stream, host: NDArray[Any], array: DeviceArray) -> None:
        """Copy contiguous ``host`` to ``array`` in the stream."""

    def download(self, stream: Stream, array: DeviceArray, host: NDArray[Any]) -> None:
        """Copy contiguous ``array`` to ``host`` in the stream."""

    def share(self, comm: MPI.Intracomm, size_bytes: int, way: Way) -> PeerMemory | None:
        """Memory that kernels of all ranks of a node reach; None, on all of them, if it cannot be had. Collective."""


def simulating() -> bool:
    """Whether numba's CUDA simulator was asked for, by numba's own variable."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def why_no_gpu() -> str:
    """Why no GPU can be used here, in a few words; empty where one can."""
    for package, module in (("cupy-cuda13x", "cupy"), ("numba-cuda", "numba_cuda")):
        if importlib.util.find_spec(module) is None:
            return f"the Python package {package} is not installed"
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
    return "" if count else "CUDA sees no device"


def gpu_count() -> int:
    """GPUs that CUDA sees, of which ``check_gpu`` has found one; the simulator's."""
    if simulating():
        return 1
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def nccl_missing() -> str:
    """Why CuPy sees no NCCL; empty where it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where it cannot load the library
        try:
            from cupy.cuda import nccl as library
        except ImportError as error:
            return str(error)
    return "" if library.available else "CuPy finds no NCCL (pip install nvidia-nccl-cu13)"


def check_gpu() -> None:
    """Raises ``ConfigError`` where there is neither a GPU nor the simulator."""
    if not simulating() and (reason := why_no_gpu()):
        raise ConfigError(
            f"backend 'cuda' finds no GPU here: {reason}",
            allowed="a machine with an NVIDIA GPU and its driver, and pip install 'dpsim[cuda]'",
            remedy="use --backend cpu (the default)",
        )


def open_device(number: int) -> Device:
    """The device of the ``number``-th process of this machine: they take the GPUs in turn, or the simulator's.

    Raises ``ConfigError`` where there is no GPU.
    """
    check_gpu()
    if simulating():
        from dpsim.comm.cuda.simulator import SimulatedDevice

        return SimulatedDevice()
    from dpsim.comm.cuda.gpu import Gpu

    return Gpu(number)
