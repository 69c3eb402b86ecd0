"""Where gradients come from and go to, as the communication stream of a device sees it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpsim.comm.cuda.device import Device, DeviceArray, Event, Stream


class Compute(Protocol):
    """What brings a bucket to the allreduce and takes the sum from it.

    A replica that computes on the GPU would let the stream follow its own stream's event in ``give``, and its own
    stream follow the returned event in ``take``, and copy nothing.
    """

    def allocate(self, size_bytes: int) -> NDArray[np.uint8]:
        """Memory in which gradients are produced."""

    def give(self, stream: Stream, produced: NDArray[Any], bucket: DeviceArray) -> None:
        """What ``stream`` does from now on finds the final gradients in ``bucket``."""

    def take(self, stream: Stream, bucket: DeviceArray, produced: NDArray[Any]) -> Event:
        """The event after which the sum in ``bucket`` is where computation goes on."""


class HostCompute:
    """Computation on the host: each bucket is copied to the device before its allreduce, and back after it.

    Over PCIe that costs more than the allreduce itself; it is here so that the kernels reduce real gradients.
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
