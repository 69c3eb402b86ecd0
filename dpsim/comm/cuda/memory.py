"""``DeviceMemory``: the memory of a device in which a replica computes, in one stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.comm.cuda.device import Device, DeviceArray, Event
from dpsim.comm.cuda.products import DeviceProducts
from dpsim.kernels.layers_cuda import LayerKernels
from dpsim.memory import Mark
from dpsim.processor import layers_by_kernels

_HOST_COPIES = 2
"""Page-locked host arrays an upload: the host fills one while the device may still read the other."""


@dataclass
class _Upload:
    """Memory for the uploads of one name, and for each host array the event after which it may be written."""

    target: DeviceArray
    hosts: list[NDArray[np.uint8]]
    read: list[Event | None] = field(default_factory=lambda: [None] * _HOST_COPIES)
    turn: int = 0


class DeviceMemory:
    """See ``dpsim.memory.Memory``. What is uploaded, computed and fetched keeps its order in one stream."""

    deferred = True

    def __init__(self, device: Device) -> None:
        self.device = device
        self.xp: Any = device.xp
        self.stream: Any = device.stream()
        self.fetches = 0
        """How often the host has waited for values."""
        self._uploads: dict[str, _Upload] = {}
        self._fetched: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._products = DeviceProducts(device, self.stream)
        self._layers = LayerKernels(self.stream.launch, device.memory) if layers_by_kernels() else None
        self.use()

    def use(self) -> None:
        self.device.use()
        self.stream.use()

    def zeros(self, size_bytes: int) -> DeviceArray:
        return self.device.memory(size_bytes)

    def upload(self, name: str, host: NDArray[Any]) -> DeviceArray:
        if not isinstance(host, np.ndarray):
            return host  # it is here already
        upload = self._uploads.get(name)
        if upload is None or upload.target.nbytes < host.nbytes:
            upload = self._uploads[name] = _Upload(
                target=self.device.memory(host.nbytes),
                hosts=[self.device.host_memory(host.nbytes) for _ in range(_HOST_COPIES)],
            )
        turn, upload.turn = upload.turn, (upload.turn + 1) % _HOST_COPIES
        if (event := upload.read[turn]) is not None:
            event.wait()
        source, target = (flat[: host.nbytes] for flat in (upload.hosts[turn], upload.target))
        source.view(host.dtype).reshape(host.shape)[...] = host
        if host.nbytes:
            self.device.upload(self.stream, source, target)
        upload.read[turn] = self.stream.record()
        return target.view(host.dtype).reshape(host.shape)

    def write(self, target: DeviceArray, host: NDArray[Any]) -> None:
        if target.nbytes:
            source = np.ascontiguousarray(host, target.dtype)
            self.device.upload(self.stream, source, target)
            self.stream.wait()

    def fetch(self, arrays: Sequence[DeviceArray]) -> list[NDArray[Any]]:
        self.use()
        self.fetches += 1
        starts = np.cumsum([0, *(-(-array.nbytes // 64) * 64 for array in arrays)]).tolist()
        if len(self._fetched) < starts[-1]:
            self._fetched = self.device.host_memory(starts[-1])
        hosts = []
        for start, array in zip(starts, arrays, strict=False):
            flat = self._fetched[start : start + array.nbytes]
            if array.nbytes:
                contiguous = self.xp.ascontiguousarray(array).reshape(-1)
                self.device.download(self.stream, contiguous.view(np.uint8), flat)
            hosts.append(flat.view(array.dtype).reshape(array.shape))
        self.stream.wait()
        return [host.copy() for host in hosts]

    def mark(self) -> Event:
        event: Event = self.stream.record()
        return event

    def follow(self, mark: Mark) -> None:
        self.stream.follow(mark)

    def address(self, array: DeviceArray) -> int:
        interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__  # the simulator's
        return int(interface["data"][0])

    def coded_products(self) -> DeviceProducts:
        return self._products

    def layer_kernels(self) -> LayerKernels | None:
        return self._layers
