"""Where gradients are computed, how they get to the communication stream of a device, and their sums back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dpsim.comm.cuda.device import Device, DeviceArray, Event, Stream
from dpsim.comm.cuda.memory import DeviceMemory
from dpsim.memory import HOST, Array, Mark, Memory


class Compute(Protocol):
    """Brings a bucket to the allreduce and takes the sum from it.

    ``memory`` is where gradients are computed, and ``where`` says it for people.
    """

    memory: Memory
    where: str

    def allocate(self, size_bytes: int, reduced: DeviceArray | None) -> Array:
        """Memory in which gradients are produced. ``reduced``: as much, in which kernels reduce them, if any do."""

    def give(self, stream: Stream, complete: Mark, produced: Sequence[Array], bucket: Sequence[DeviceArray]) -> None:
        """Work that ``stream`` gets later finds the final gradients of every slot in ``bucket``.

        ``complete`` is a mark of the memory from after these gradients were computed.
        """

    def take(self, stream: Stream, bucket: DeviceArray, produced: Array) -> Event:
        """The event after which the sum in ``bucket`` has reached computation."""


class HostCompute:
    """Computation on the host: each bucket is copied to the device before its allreduce, and back after it.

    Over PCIe that costs more than the allreduce itself. It is for replicas that know no other memory than the host's.
    """

    memory: Memory = HOST
    where = "on the host"

    def __init__(self, device: Device) -> None:
        self._device = device

    def allocate(self, size_bytes: int, reduced: DeviceArray | None) -> Array:
        return self._device.host_memory(size_bytes)

    def give(self, stream: Stream, complete: Mark, produced: Sequence[Array], bucket: Sequence[DeviceArray]) -> None:
        for host, array in zip(produced, bucket, strict=True):
            self._device.upload(stream, host, array)

    def take(self, stream: Stream, bucket: DeviceArray, produced: Array) -> Event:
        self._device.download(stream, bucket, produced)
        return stream.record()


class DeviceCompute:
    """Computation on the device, in the memory that kernels reduce: nothing is copied, streams follow each other."""

    def __init__(self, device: Device) -> None:
        self.memory: Memory = DeviceMemory(device)
        self.where = f"on {device.name}"

    def allocate(self, size_bytes: int, reduced: DeviceArray | None) -> Array:
        return self.memory.zeros(size_bytes) if reduced is None else reduced

    def give(self, stream: Stream, complete: Mark, produced: Sequence[Array], bucket: Sequence[DeviceArray]) -> None:
        stream.follow(complete)

    def take(self, stream: Stream, bucket: DeviceArray, produced: Array) -> Event:
        """The update waits for it on the host: the stream of the computation must not, since backward goes on."""
        return stream.record()
