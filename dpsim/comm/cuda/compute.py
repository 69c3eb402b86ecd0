"""How gradients get to the communication stream of a device, and their sums back to computation."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpsim.comm.cuda.device import Device, DeviceArray, Event, Stream


class Compute(Protocol):
    """Brings a bucket to the allreduce and takes the sum from it.

    A replica that computes on the GPU would copy nothing: in ``give`` the communication stream would follow an event of
    the replica's stream, and the replica's stream would follow the event that ``take`` returns.
    """

    def allocate(self, size_bytes: int) -> NDArray[np.uint8]:
        """Memory in which gradients are produced."""

    def give(self, stream: Stream, produced: NDArray[Any], bucket: DeviceArray) -> None:
        """Work that ``stream`` gets later finds the final gradients in ``bucket``."""

    def take(self, stream: Stream, bucket: DeviceArray, produced: NDArray[Any]) -> Event:
        """The event after which the sum in ``bucket`` has reached computation."""


class HostCompute:
    """Computation on the host: each bucket is copied to the device before its allreduce, and back after it.

    Over PCIe that costs more than the allreduce itself; it exists so that the kernels reduce real gradients.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def allocate(self, size_bytes: int) -> NDArray[np.uint8]:
        return self._device.host_memory(size_bytes)

    def give(self, stream: Stream, produced: NDArray[Any], bucket: DeviceArray) -> None:
        self._device.upload(stream, produced, bucket)

    def take(self, stream: Stream, bucket: DeviceArray, produced: NDArray[Any]) -> Event:
        self._device.download(stream, bucket, produced)
        return stream.record()
