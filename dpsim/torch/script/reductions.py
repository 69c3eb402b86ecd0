"""DDP's buckets are averaged by dpsim's MPI transports, through a communication hook. Loads torch."""

from __future__ import annotations

from typing import Any

import torch

from dpsim.comm.clock import now
from dpsim.comm.progress import BucketAllreduce, progress
from dpsim.comm.transport import Array, Transport
from dpsim.errors import ConfigError


class MpiReduction:
    """The mean over all ranks by an allreduce of dpsim's own, over MPI messages as they are or held to a paced link.

    With ``overlap`` inline the caller waits for each; with ``thread`` a thread of dpsim's runs them one after another.
    ``waited_s`` is how long callers have waited so far. ``starts`` has, for every reduction since it was cleared, when
    it was asked for, and what callers had waited by then.
    """

    def __init__(self, link: Transport, algorithm: str, overlap: str) -> None:
        self._link, self._inline = link, overlap == "inline"
        self._mechanism = progress(link, algorithm, overlap, self._finished)
        self._prepared: dict[tuple[int, int], BucketAllreduce] = {}
        self._under_way: dict[int, tuple[Any, Any]] = {}
        self._started = 0
        self.waited_s = 0.0
        self.starts: list[tuple[float, float]] = []

    def reduce(self, tensor: Any) -> Any:
        began_s = now()
        self.starts.append((began_s, self.waited_s))
        tensor.div_(self._link.size)
        place = tensor.data_ptr(), tensor.numel()
        if place not in self._prepared:
            self._prepared[place] = self._mechanism.prepare(_array(tensor))
        future: Any = torch.futures.Future()
        number, self._started = self._started, self._started + 1
        self._under_way[number] = future, tensor
        self._mechanism.submit(number, self._prepared[place])
        if self._inline:
            self.waited_s += now() - began_s
        return future

    def _finished(self, bucket: int, size_bytes: int, start_s: float, end_s: float) -> None:
        future, tensor = self._under_way.pop(bucket)
        future.set_result(tensor)

    def close(self) -> None:
        self._mechanism.close()


def _array(tensor: Any) -> Array:
    """The memory of a tensor as a flat array. Raises ``ConfigError``."""
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.float64, torch.float16):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ConfigError(
            f"gradients of {dtype} on {tensor.device.type} through a hook over MPI",
            allowed="float32, float64 or float16 in the host's memory",
            remedy="measure this script with --algorithm gloo",
        )
    array: Array = tensor.detach().view(-1).numpy()
    return array
