"""How DDP's buckets are averaged: by gloo, or by dpsim's MPI transports through a communication hook. Loads torch."""

from __future__ import annotations

from typing import Any

import torch

from dpsim.comm.clock import now
from dpsim.comm.progress import BucketAllreduce, Finished, progress
from dpsim.comm.transport import Array, Transport
from dpsim.errors import ConfigError


class GlooReduction:
    """gloo's own allreduce (sum) on a process group. DDP divides the gradients as it copies them into the bucket."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def reduce(self, tensor: Any) -> Any:
        """Start to reduce a flat tensor; a future of it. Every rank starts the same ones in the same order."""
        return self.group.allreduce([tensor]).get_future()

    def close(self) -> None:
        """End; nothing may be under way."""


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


Reduction = GlooReduction | MpiReduction
"""What reduces a tensor over all ranks in place, as DDP asks for it."""


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


class FutureProgress:
    """Runs allreduces beside a load as ``dpsim.comm.progress.Progress`` does, by a ``Reduction``.

    Their ends are seen by ``poll``, which the load calls often: a callback would take the interpreter's lock on a
    thread that reduces, as nothing does while DDP trains.
    """

    def __init__(self, reduction: Reduction, finished: Finished) -> None:
        self._reduction, self._report = reduction, finished
        self._under_way: list[tuple[int, int, Any]] = []
        self._last_s = 0.0  # when the first one that is under way began to take its turn
        self.bucket = -1

    def prepare(self, data: Array, order: object = None, kind: str = "allreduce") -> BucketAllreduce:
        return BucketAllreduce(ReducedArray(self._reduction, data), data.nbytes)

    def submit(self, bucket: int, allreduce: BucketAllreduce) -> None:
        if not self._under_way:
            self._last_s = now()
        reduced = allreduce.prepared
        assert isinstance(reduced, ReducedArray)
        self._under_way.append((bucket, allreduce.size_bytes, reduced.begin()))

    def poll(self) -> None:
        for entry in [entry for entry in self._under_way if entry[2].done()]:
            self._ended(entry)

    def enqueue(self) -> None:
        """The calling thread waits for all of them in ``finish``."""

    def finish_until(self, count: int) -> None:
        """Return when all of them have ended."""
        self.finish()

    def finish(self) -> None:
        while self._under_way:
            self._under_way[0][2].wait()
            self._ended(self._under_way[0])

    def _ended(self, entry: tuple[int, int, Any]) -> None:
        self._under_way.remove(entry)
        end_s = now()
        self._report(entry[0], entry[1], self._last_s, end_s)
        self._last_s = end_s

    def close(self) -> None:
        self._reduction.close()


class ReducedArray:
    """An array that a ``Reduction`` reduces again and again, as a ``PersistentAllreduce``."""

    def __init__(self, reduction: Reduction, data: Array) -> None:
        self._reduction, self._tensor = reduction, torch.from_numpy(data)

    def begin(self) -> Any:
        """Start to reduce it; the future."""
        return self._reduction.reduce(self._tensor)

    def run(self) -> None:
        self.begin().wait()

    def start(self) -> Any:
        """Reduce it at once; there are no steps to wait for."""
        self.run()
        yield from ()
