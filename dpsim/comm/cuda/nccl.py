"""NCCL between the GPUs of several ranks, by CuPy: what it is asked for is put into a stream, and the host goes on.

NCCL's kernels wait for those of the other ranks, and so do dpsim's (``flags``). Two kernels that wait on one GPU can
keep each other from running, so a transport has NCCL or kernels that wait, never both (``paths.open_reducer``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsim.comm.cuda.available import nccl_missing, simulating
from dpsim.comm.cuda.device import Device, DeviceArray, Stream
from dpsim.comm.cuda.reducer import OwnBlocks, Task, own_slots
from dpsim.comm.transport import CollectiveSteps
from dpsim.errors import CommunicationError
from dpsim.kernels.allreduce.cuda.arguments import address_of

if TYPE_CHECKING:
    from mpi4py import MPI


def why_no_nccl(device: Device, comm: MPI.Intracomm) -> str:
    """Return why NCCL cannot work between these ranks, the same on all of them; empty if it can. Collective."""
    missing = "numba's simulator has no NCCL" if simulating() else nccl_missing()
    rows: list[tuple[str, str]] = comm.allgather((missing, device.identity))
    for rank, (reason, _) in enumerate(rows):
        if reason:
            return f"rank {rank}: {reason}"
    if len({identity for _, identity in rows}) < comm.size:
        return "ranks share a GPU, and NCCL takes one rank a GPU"
    return ""


def load() -> Any:
    """Return CuPy's interface to NCCL."""
    from cupy.cuda import nccl

    return nccl


class Nccl:
    """NCCL's communicator of these ranks, each with a GPU of its own. Collective.

    ``library`` is CuPy's module, or what stands in for it. Raises ``CommunicationError`` where NCCL refuses something.
    """

    def __init__(self, comm: MPI.Intracomm, device: Device, library: Any = None) -> None:
        device.use()
        self._library = load() if library is None else library
        identity = comm.bcast(self._library.get_unique_id() if comm.rank == 0 else None)
        with _refusals():
            self._communicator = self._library.NcclCommunicator(comm.size, identity, comm.rank)

    def all_reduce(self, source: DeviceArray, target: DeviceArray, dtype: str, stream: Stream) -> None:
        """``target`` = the sum over the ranks of ``source``, in NCCL's own order of addition."""
        kind, add = getattr(self._library, f"NCCL_{dtype.upper()}"), self._library.NCCL_SUM
        addresses = address_of(source), address_of(target)
        with _refusals():
            self._communicator.allReduce(*addresses, source.size, kind, add, int(stream.launch))

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Group messages that belong together: none waits for another one of them."""
        with _refusals():
            self._library.groupStart()
            try:
                yield
            finally:
                self._library.groupEnd()

    def send(self, array: DeviceArray, to: int, stream: Stream) -> None:
        """Send an array of bytes, within a group."""
        self._communicator.send(address_of(array), array.size, self._library.NCCL_UINT8, to, int(stream.launch))

    def receive(self, array: DeviceArray, source: int, stream: Stream) -> None:
        """Receive an array of bytes, within a group."""
        self._communicator.recv(address_of(array), array.size, self._library.NCCL_UINT8, source, int(stream.launch))

    def all_gather(self, own: DeviceArray, first: DeviceArray, stream: Stream) -> None:
        """Bring together ``own`` of every rank, arrays of bytes, one behind the other from where ``first`` begins."""
        addresses, kind = (address_of(own), address_of(first)), self._library.NCCL_UINT8
        with _refusals():
            self._communicator.allGather(*addresses, own.size, kind, int(stream.launch))

    def check(self) -> None:
        """Raise ``CommunicationError`` if something went wrong in a stream."""
        with _refusals():
            self._communicator.check_async_error()

    def close(self) -> None:
        """Destroy the communicator, whose streams must be empty. Collective."""
        self._communicator.destroy()


class NcclAllreduce(OwnBlocks):
    """A ``Reducer`` in which NCCL adds, in an order that depends on the number of ranks and its version."""

    path = "nccl"
    how = "added by NCCL"
    queued = True

    def __init__(self, comm: MPI.Intracomm, device: Device, nccl: Nccl) -> None:
        super().__init__(comm, device)
        self._nccl, self.check = nccl, nccl.check

    def version(self, algorithm: str, size_bytes: int, *, sixteen_bits: bool) -> str:
        return self.path

    def compile(self, task: Task) -> None:
        """Do nothing: there is nothing to compile; ``dpsim.constraints`` refuses leaves and 16 bits."""

    def agree(self, task: Task) -> CollectiveSteps:
        yield from ()

    def reduce(self, task: Task, stream: Stream) -> CollectiveSteps:
        (array,) = own_slots(self, task, self._comm.rank)
        self._nccl.all_reduce(array, array, task.kernel.dtype, stream)
        yield from ()

    def close(self) -> None:
        self._nccl.close()
        super().close()


def version(library: Any) -> str:
    """Return the version of NCCL, like 2.28.3."""
    number = int(library.get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def wrong_calls(comm: MPI.Intracomm, device: Device, library: Any = None) -> str:
    """Return the calls made in training that give wrong data on this rank; empty if none. Collective.

    Each rank adds, gathers, and sends to the next one, the last to the first; one rank alone sends to itself.
    """
    stream, nccl = device.stream(), Nccl(comm, device, library)
    source, total, received, gathered = (device.memory(16 * count) for count in (1, 1, 1, comm.size))
    numbers = [np.arange(1, 5, dtype=np.float32) * (rank + 1) for rank in range(comm.size)]
    device.upload(stream, numbers[comm.rank].view(np.uint8), source)
    nccl.all_reduce(source.view(np.float32), total.view(np.float32), "float32", stream)
    nccl.all_gather(source, gathered, stream)
    with nccl.group():
        nccl.send(source, (comm.rank + 1) % comm.size, stream)
        nccl.receive(received, (comm.rank - 1) % comm.size, stream)
    calls = {
        "all-reduce": (total, sum(numbers[1:], numbers[0])),
        "all-gather": (gathered, np.concatenate(numbers)),
        "send and receive": (received, numbers[comm.rank - 1]),
    }
    wrong = []
    for name, (array, wanted) in calls.items():
        copy = np.empty(wanted.nbytes, np.uint8)
        device.download(stream, array, copy)
        stream.wait()
        if copy.tobytes() != wanted.tobytes():
            wrong.append(name)
    nccl.check()
    nccl.close()
    return ", ".join(wrong)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn CuPy's ``NcclError``, which is a ``RuntimeError``, into ``CommunicationError``."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"NCCL fails: {error}", remedy="run again with NCCL_DEBUG=WARN, which says more; see nvidia-smi and dmesg"
        ) from error
