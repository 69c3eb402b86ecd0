"""Memory of one training run: gradients bucket after bucket, parameters and optimizer state at the same offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.shards import LINE, shard_bounds
from dpsim.memory import HOST, Memory
from dpsim.schedule import Schedule

if TYPE_CHECKING:
    from mpi4py import MPI

Array = NDArray[Any]
Tensors = dict[str, dict[str, Array]]
"""The tensors of each of the optimizer's slots, by slot and name."""
_ALIGNMENT_BYTES = 64


def gradient_dtype(schedule: Schedule) -> np.dtype[Any]:
    """The one dtype of all the tensors, float32 or float64. Raises ``ConfigError``."""
    dtypes = {tensor.dtype for tensor in schedule.workload.tensors}
    if len(dtypes) != 1 or not dtypes <= {"float32", "float64"}:
        raise ConfigError(f"tensors in {', '.join(sorted(dtypes))}", allowed="all in float32, or all in float64")
    return np.dtype(dtypes.pop())


class Shard(NamedTuple):
    """Elements of the flat arrays that a rank updates, and where the rank's own optimizer state for them lies."""

    elements: slice
    state: slice


class Arena:
    """Flat arrays whose slices are the buckets and whose reshaped slices are the tensors.

    ``gradients``, ``parameters`` and each slot of ``optimizer_state`` are 1-D of one length and dtype. Tensors of a
    bucket stand without gaps in the order in which backward makes them final, so a bucket is one message; buckets start
    at 64-byte boundaries (the gaps stay zero and never count toward a bucket's size).

    With the fixed order of addition a rank may hold several slots: ``slots`` are their gradients, the first of them
    ``gradients``. Every rank allocates ``slots`` of them (as many as any rank has).

    ``shards`` are the parts that ``rank`` updates: everything, or where the schedule is sharded a part of each bucket.
    Then parameters are memory of the transport's as gradients are, and each slot of ``optimizer_state`` holds nothing
    but the rank's shards, one after another.

    ``memory`` is where parameters and optimizer state lie; ``allocate`` takes that of the gradients from there too.
    """

    def __init__(
        self,
        schedule: Schedule,
        dtype: np.dtype[Any],
        allocate: Callable[[int], NDArray[np.uint8]],
        slots: int = 1,
        rank: int = 0,
        memory: Memory = HOST,
    ) -> None:
        tensors = schedule.workload.tensors
        align = _ALIGNMENT_BYTES // dtype.itemsize
        self._slices: dict[str, tuple[int, tuple[int, ...]]] = {}
        bounds: list[tuple[int, int]] = []
        offset = 0
        for bucket in range(schedule.buckets):
            offset = -(-offset // align) * align
            first = offset
            for index in schedule.tensor_order[schedule.bucket_start[bucket] : schedule.bucket_start[bucket + 1]]:
                self._slices[tensors[index].name] = (offset, tensors[index].shape)
                offset += tensors[index].elements
            bounds.append((first, offset))
        size_bytes = max(offset, 1) * dtype.itemsize
        self.slots: tuple[Array, ...] = tuple(allocate(size_bytes).view(dtype) for _ in range(slots))
        self.gradients: Array = self.slots[0]
        self.sharded = schedule.sharded
        self.memory = memory
        parameter_memory = allocate if self.sharded else memory.zeros
        self.parameters: Array = parameter_memory(size_bytes).view(dtype)
        self._bounds, self._ranks = bounds, schedule.plan.devices
        self.shards = self.shards_of(rank)
        own_bytes = self.shards[-1].state.stop * dtype.itemsize if self.shards else 0
        self.optimizer_state: dict[str, Array] = {
            slot: memory.zeros(own_bytes).view(dtype) for slot in schedule.plan.optimizer.slots
        }

    @property
    def size_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer state."""
        return int(self.parameters.nbytes) + sum(int(s.nbytes) for s in self.slots) + self.optimizer_state_bytes

    @property
    def optimizer_state_bytes(self) -> int:
        """The memory of this rank's optimizer state."""
        return sum(own.nbytes for own in self.optimizer_state.values())

    def shards_of(self, rank: int) -> tuple[Shard, ...]:
        """The parts that a rank updates; none of them is empty."""
        whole = slice(0, len(self.parameters))
        if not self.sharded:
            return (Shard(whole, whole),)
        shards, offset = [], 0
        for first, stop in self._bounds:
            low, high = shard_bounds(stop - first, self._ranks)[rank : rank + 2]
            if low < high:
                shards.append(Shard(slice(first + low, first + high), slice(offset, offset + high - low)))
                offset += -(-(high - low) // LINE) * LINE
        return tuple(shards)

    def buckets(self, first: int, stop: int, slot: int = 0) -> Array:
        """The gradients of buckets ``first`` to ``stop - 1``, 1-D: what an allreduce reduces in place.

        One bucket has no padding; several have the gaps between them, which are zero.
        """
        return self.slots[slot][self._bounds[first][0] : self._bounds[stop - 1][1]]

    def bucket_parameters(self, bucket: int) -> Array:
        """The parameters of a bucket, 1-D: what an all-gather brings together in place."""
        return self.parameters[slice(*self._bounds[bucket])]

    def tensors(self) -> list[tuple[slice, bool]]:
        """Where each tensor lies in the flat arrays, and whether it has two dimensions or more."""
        return [
            (slice(start, start + int(np.prod(shape, dtype=np.int64))), len(shape) > 1)
            for start, shape in self._slices.values()
        ]

    def zeros(self) -> Array:
        """A flat array of zeros more, as long as the parameters, in the same memory."""
        return self.memory.zeros(self.parameters.nbytes).view(self.parameters.dtype)

    def on_host(self, flat: Array) -> dict[str, Array]:
        """The tensors of one of the flat arrays as host arrays, which share its memory if that is the host's."""
        (host,) = self.memory.fetch([flat])
        return self.views(host)

    def views(self, flat: Array) -> dict[str, Array]:
        """The tensors of one of the flat arrays (or of an array of the same length) by name, sharing its memory."""
        return {
            name: flat[start : start + int(np.prod(shape, dtype=np.int64))].reshape(shape)
            for name, (start, shape) in self._slices.items()
        }


def gathered(arena: Arena, comm: MPI.Intracomm, root: int | None = None) -> Tensors:
    """The whole optimizer state as host arrays, on every rank or on ``root`` (elsewhere empty).

    Collective where it is sharded. Where it is not, it shares the arena's memory if that is the host's.
    """
    if not arena.sharded:
        return {slot: arena.on_host(flat) for slot, flat in arena.optimizer_state.items()}
    whole: Tensors = {}
    for slot, own in arena.optimizer_state.items():
        parts = comm.allgather(own) if root is None else comm.gather(own, root)
        if parts is not None:
            flat = np.zeros_like(arena.parameters)
            for rank, part in enumerate(parts):
                for shard in arena.shards_of(rank):
                    flat[shard.elements] = part[shard.state]
            whole[slot] = arena.views(flat)
    return whole


def distribute(arena: Arena, comm: MPI.Intracomm, whole: Mapping[str, Mapping[str, Array]] | None) -> None:
    """Set every rank's optimizer state to its part of rank 0's ``whole`` one (None elsewhere). Collective.

    Tensors of ``whole`` are by slot and name.
    """
    for slot, own in arena.optimizer_state.items():
        parts = None
        if whole is not None:
            flat = np.zeros(arena.parameters.shape, arena.parameters.dtype)
            for name, view in arena.views(flat).items():
                view[...] = whole[slot][name]
            parts = [_packed(arena, rank, flat) for rank in range(comm.size)] if arena.sharded else [flat]
        if arena.sharded:
            own[...] = comm.scatter(parts)
            continue
        host = parts[0] if parts is not None else np.empty(own.shape, own.dtype)
        comm.Bcast(host)
        arena.memory.write(own, host)


def _packed(arena: Arena, rank: int, flat: Array) -> Array:
    """A rank's part of a flat array, as it lies in its optimizer state."""
    shards = arena.shards_of(rank)
    packed = np.zeros(shards[-1].state.stop if shards else 0, flat.dtype)
    for shard in shards:
        packed[shard.state] = flat[shard.elements]
    return packed
