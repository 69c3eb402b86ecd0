"""Memory of one rank: gradients bucket after bucket, parameters and optimizer state, whole or in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Return the one dtype of all the tensors, float32 or float64. Raises ``ConfigError``."""
    dtypes = {tensor.dtype for tensor in schedule.workload.tensors}
    if len(dtypes) != 1 or not dtypes <= {"float32", "float64"}:
        raise ConfigError(f"tensors in {', '.join(sorted(dtypes))}", allowed="all in float32, or all in float64")
    return np.dtype(dtypes.pop())


class Shard(NamedTuple):
    """A part of bucket ``bucket``, its elements ``low`` to ``high - 1``, which a rank updates.

    ``element`` is where it begins among the elements of all buckets, ``state`` where it begins in what the rank keeps
    of it alone: optimizer state, and where buckets have no memory of their own, parameters and gradients.
    """

    bucket: int
    low: int
    high: int
    element: int
    state: int


class TensorPart(NamedTuple):
    """Part of a tensor that a rank updates: where it begins in the arrays of parameters, gradients and state."""

    name: str
    matrix: bool
    elements: int
    parameters: int
    gradients: int
    state: int


class Arena:
    """Flat arrays whose slices are the buckets and whose reshaped slices are the tensors.

    Tensors of a bucket stand without gaps in the order in which backward makes them final, so a bucket is one message;
    buckets start at 64-byte boundaries (the gaps stay zero and never count toward a bucket's size). ``gradients`` and
    ``parameters`` are 1-D of one dtype, and hold the buckets of the rank's class. Where the schedule has slots they
    hold as many of them at once, each in the memory of its slot, and ``own_gradients`` and ``own_parameters`` hold the
    rank's shards; else these are None, and shards lie in the buckets.

    With the fixed order of addition a rank may hold several partial sums: ``slots`` are their gradients, the first of
    them ``gradients``. Every rank allocates ``slots`` of them (as many as any rank has).

    ``shards`` are the parts that ``rank`` updates: all its buckets, or where the schedule is sharded a part of each.
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
        self._align = align = _ALIGNMENT_BYTES // dtype.itemsize
        self._schedule, self.sharded, self.memory = schedule, schedule.sharded or bool(schedule.owners), memory
        self._tensors: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self._sizes: list[int] = []
        for bucket in range(schedule.buckets):
            size = 0
            for index in schedule.tensor_order[schedule.bucket_start[bucket] : schedule.bucket_start[bucket + 1]]:
                self._tensors[tensors[index].name] = (bucket, size, tensors[index].shape)
                size += tensors[index].elements
            self._sizes.append(size)
        self._first, self._elements = _slot_starts(self._sizes, range(schedule.buckets), 0, align)
        own = schedule.buckets_of(schedule.class_of(rank))
        self._gradient_at, gradients = _slot_starts(self._sizes, own, schedule.gradient_slots, align)
        self._parameter_at, parameters = _slot_starts(self._sizes, own, schedule.parameter_slots, align)
        size_bytes = max(gradients, 1) * dtype.itemsize
        self.slots: tuple[Array, ...] = tuple(allocate(size_bytes).view(dtype) for _ in range(slots))
        self.gradients: Array = self.slots[0]
        parameter_memory = allocate if self.sharded else memory.zeros
        self.parameters: Array = parameter_memory(max(parameters, 1) * dtype.itemsize).view(dtype)
        self.shards = self.shards_of(rank)
        self.of_first_replica = schedule.plan.place_of(rank) < schedule.plan.shard_devices
        """Whether the rank's shards are those of the first of several copies of the parameters, or of the only one."""
        self._shard_of = {shard.bucket: shard for shard in self.shards}
        self._kept = len(self.parameters)
        if self.sharded:
            self._kept = self.shards[-1].state + self.shards[-1].high - self.shards[-1].low if self.shards else 0
        self.own_gradients = self._zeros(self._kept) if schedule.gradient_slots else None
        self.own_parameters = self._zeros(self._kept) if schedule.parameter_slots else None
        self.optimizer_state: dict[str, Array] = {
            slot: self._zeros(self._kept) for slot in schedule.plan.optimizer.slots
        }

    @property
    def parameter_bytes(self) -> int:
        """The memory of this rank's parameters, shards of its own included."""
        return int(self.parameters.nbytes) + (0 if self.own_parameters is None else self.own_parameters.nbytes)

    @property
    def gradient_bytes(self) -> int:
        """The memory of this rank's gradients, shards of its own included."""
        own = 0 if self.own_gradients is None else self.own_gradients.nbytes
        return sum(int(slot.nbytes) for slot in self.slots) + own

    @property
    def optimizer_state_bytes(self) -> int:
        """The memory of this rank's optimizer state."""
        return sum(own.nbytes for own in self.optimizer_state.values())

    @property
    def sums_everything(self) -> bool:
        """Whether every rank has the sums of all gradients."""
        return self._schedule.classes == 1 and not self._schedule.sharded

    @property
    def keeps_everything(self) -> bool:
        """Whether every rank updates all parameters."""
        return self._schedule.classes == 1 and not self.sharded

    @property
    def updated_share(self) -> float:
        """The part of all parameters that this rank updates."""
        return sum(shard.high - shard.low for shard in self.shards) / max(sum(self._sizes), 1)

    @property
    def has_all_parameters(self) -> bool:
        """Whether every rank has all parameters in memory between two steps."""
        return self._schedule.classes == 1 and not self._schedule.gathers_before_use

    def shards_of(self, rank: int) -> tuple[Shard, ...]:
        """Return the parts that a rank updates; none of them is empty."""
        schedule, shards, offset = self._schedule, list[Shard](), 0
        sharing = schedule.plan.shard_devices
        index = schedule.plan.place_of(rank) % sharing
        buckets = schedule.buckets_of(schedule.class_of(rank))
        at, _ = _slot_starts(self._sizes, buckets, 0, self._align)
        for bucket in buckets:
            for low, high in self._bounds(bucket, index, sharing):
                state = offset if self.sharded else at[bucket]
                shards.append(Shard(bucket, low, high, self._first[bucket] + low, state))
                offset += -(-(high - low) // LINE) * LINE
        return tuple(shards)

    def _bounds(self, bucket: int, index: int, sharing: int) -> list[tuple[int, int]]:
        """Return the elements of a bucket that the device ``index`` of those that share it updates."""
        schedule, size = self._schedule, self._sizes[bucket]
        bounds = [(0, size)]
        if schedule.owners:
            tensors = schedule.tensor_order[schedule.bucket_start[bucket] : schedule.bucket_start[bucket + 1]].tolist()
            own = [schedule.workload.tensors[each] for each in tensors if schedule.owners[each] == index]
            bounds = [(low := self._tensors[each.name][1], low + each.elements) for each in own]
        elif self.sharded:
            low, high = shard_bounds(size, sharing)[index : index + 2]
            bounds = [(low, high)]
        return [(low, high) for low, high in bounds if low < high]

    def updated_parts(self) -> list[tuple[Array, Array, dict[str, Array]]]:
        """Return parameters, gradients and optimizer state of what the rank updates: all at once, or shard by shard."""
        if not self.sharded:
            return [(self.parameters, self.gradients, self.optimizer_state)]
        return [
            (
                self.shard_parameters(shard),
                self.shard_gradients(shard),
                {slot: own[shard.state :][: shard.high - shard.low] for slot, own in self.optimizer_state.items()},
            )
            for shard in self.shards
        ]

    def shard_parameters(self, shard: Shard) -> Array:
        """Return the memory in which a shard's parameters are kept from step to step."""
        return self._updated_part(shard, self.own_parameters, self._parameter_at, self.kept_parameters)

    def shard_gradients(self, shard: Shard) -> Array:
        """Return the memory in which the sum of a shard's gradients is when it is updated."""
        return self._updated_part(shard, self.own_gradients, self._gradient_at, self.kept_gradients)

    def _updated_part(self, shard: Shard, own: Array | None, at: Mapping[int, int], flat: Array) -> Array:
        start = shard.state if own is not None else at[shard.bucket] + shard.low
        return flat[start : start + shard.high - shard.low]

    def tensor_parts(self) -> list[TensorPart]:
        """Return the parts of tensors that the rank updates, tensor by tensor; a matrix has two dimensions or more."""
        parts = []
        for name, (bucket, offset, shape) in self._tensors.items():
            stop = offset + _elements(shape)
            for shard in self.shards:
                low, high = max(offset, shard.low), min(stop, shard.high)
                if shard.bucket == bucket and low < high:
                    state = shard.state + low - shard.low
                    parameters = state if self.own_parameters is not None else self._parameter_at[bucket] + low
                    gradients = state if self.own_gradients is not None else self._gradient_at[bucket] + low
                    parts.append(TensorPart(name, len(shape) > 1, high - low, parameters, gradients, state))
        return parts

    @property
    def kept_parameters(self) -> Array:
        """The flat array in which the parameters that the rank updates are kept."""
        return self.parameters if self.own_parameters is None else self.own_parameters

    @property
    def kept_gradients(self) -> Array:
        """The flat array in which the sums of the gradients are that the rank updates with."""
        return self.gradients if self.own_gradients is None else self.own_gradients

    @property
    def matrices(self) -> list[str]:
        """The names of all tensors of two dimensions or more."""
        return [name for name, (_, _, shape) in self._tensors.items() if len(shape) > 1]

    def keep_gradients(self, bucket: int) -> None:
        """Copy the rank's shard of a bucket's sum out of the slot that it has, if it has no memory of its own."""
        self._copy_shard(bucket, self.own_gradients, self.gradients, self._gradient_at, out=True)

    def bring_parameters(self, bucket: int) -> None:
        """Copy the rank's shard of a bucket's parameters into the slot that it gets, if it has no memory of its own."""
        self._copy_shard(bucket, self.own_parameters, self.parameters, self._parameter_at, out=False)

    def _copy_shard(self, bucket: int, own: Array | None, flat: Array, at: Mapping[int, int], *, out: bool) -> None:
        shard = self._shard_of.get(bucket)
        if own is None or shard is None:
            return
        start, size = at[bucket] + shard.low, shard.high - shard.low
        own_part, slot = own[shard.state : shard.state + size], flat[start : start + size]
        if out:
            own_part[...] = slot
        else:
            slot[...] = own_part

    def buckets(self, first: int, stop: int, slot: int = 0) -> Array:
        """Return the gradients of buckets ``first`` to ``stop - 1``, 1-D: what an allreduce reduces in place.

        One bucket has no padding; several have the gaps between them, which are zero.
        """
        last = stop - 1
        return self.slots[slot][self._gradient_at[first] : self._gradient_at[last] + self._sizes[last]]

    def bucket_parameters(self, bucket: int) -> Array:
        """Return the parameters of a bucket, 1-D: what an all-gather brings together in place."""
        start = self._parameter_at[bucket]
        return self.parameters[start : start + self._sizes[bucket]]

    def zeros(self) -> Array:
        """Return another flat array of zeros, as long as the gradients, in the same memory."""
        return self._zeros(len(self.gradients))

    def _zeros(self, elements: int) -> Array:
        return self.memory.zeros(elements * self.parameters.itemsize).view(self.parameters.dtype)

    def on_host(self, flat: Array) -> dict[str, Array]:
        """Return the tensors of an array of all buckets on the host; they share its memory if that is the host's."""
        (host,) = self.memory.fetch([flat])
        return self.views(host)

    def views(self, flat: Array) -> dict[str, Array]:
        """Return the tensors of an array of all buckets by name, sharing its memory."""
        return self._views(flat, self._first)

    def parameter_views(self) -> dict[str, Array]:
        """Return the parameters of the rank's class by name: where they are while they are in memory."""
        return self._views(self.parameters, self._parameter_at)

    def gradient_views(self, flat: Array) -> dict[str, Array]:
        """Return the gradients of the rank's class in ``gradients``, or in an array as long as that, by name."""
        return self._views(flat, self._gradient_at)

    def _views(self, flat: Array, at: Mapping[int, int]) -> dict[str, Array]:
        return {
            name: flat[at[bucket] + offset : at[bucket] + offset + _elements(shape)].reshape(shape)
            for name, (bucket, offset, shape) in self._tensors.items()
            if bucket in at
        }

    def packed(self, flat: Array, of_shard: Callable[[Shard], Array]) -> Array:
        """Return what the rank updates of parameters or gradients, laid out as its optimizer state.

        ``flat`` is where it lies, which is what is returned where it lies so already.
        """
        if not self.sharded or flat is self.own_parameters or flat is self.own_gradients:
            return flat
        packed = np.zeros(self._kept, flat.dtype)
        for shard in self.shards:
            packed[shard.state : shard.state + shard.high - shard.low] = of_shard(shard)
        return packed

    def own_part(self, flat: Array) -> Array:
        """Return this rank's part of an array of all buckets, on the host, laid out as its optimizer state."""
        packed = np.zeros(self._kept, flat.dtype)
        _copy(self.shards, flat, packed)
        return packed

    def flat(self, tensors: Mapping[str, Array] | None) -> Array:
        """Return an array of all buckets with these tensors, or with zeros, on the host."""
        flat = np.zeros(max(self._elements, 1), self.parameters.dtype)
        if tensors is not None:
            for name, view in self.views(flat).items():
                view[...] = tensors[name]
        return flat

    def set_parameters(self, flat: Array) -> None:
        """Set the parameters that the rank keeps to those of an array of all buckets, on the host."""
        if self.own_parameters is not None:
            self.own_parameters[...] = self.own_part(flat)
            return
        values = self.views(flat)
        for name, view in self.parameter_views().items():
            self.memory.write(view, values[name])


def gathered(arena: Arena, comm: MPI.Intracomm, own: Array, root: int | None = None) -> dict[str, Array]:
    """Gather the model's tensors from the ranks' parts, as host arrays, on every rank or on ``root``.

    ``own`` lies as the rank's optimizer state does. Elsewhere than on ``root`` the result is empty. Collective, except
    where every rank keeps everything: then it shares the arena's memory if that is the host's.
    """
    if arena.keeps_everything:
        return arena.on_host(own)
    parts = comm.allgather(own) if root is None else comm.gather(own, root)
    if parts is None:
        return {}
    flat = arena.flat(None)
    for rank, part in enumerate(parts):
        _copy(arena.shards_of(rank), part, flat, all_buckets=False)
    return arena.views(flat)


def distribute(arena: Arena, comm: MPI.Intracomm, state: Mapping[str, Mapping[str, Array]] | None) -> None:
    """Set every rank's optimizer state to its part of rank 0's ``state`` (None elsewhere). Collective.

    Tensors of ``state`` are by slot and name.
    """
    for slot, own in arena.optimizer_state.items():
        flat = arena.flat(None if state is None else state[slot])
        comm.Bcast(flat)
        arena.memory.write(own, arena.own_part(flat))


def _copy(shards: Iterable[Shard], source: Array, target: Array, *, all_buckets: bool = True) -> None:
    """Copy shards from an array of all buckets (``all_buckets``) to one of what a rank keeps, or back."""
    for shard in shards:
        size = shard.high - shard.low
        at, to = (shard.element, shard.state) if all_buckets else (shard.state, shard.element)
        target[to : to + size] = source[at : at + size]


def _elements(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _slot_starts(sizes: Sequence[int], buckets: Sequence[int], slots: int, align: int) -> tuple[dict[int, int], int]:
    """Return where buckets begin, and the elements of all: one after another, or the k-th in slot k % slots."""
    slots = min(slots, len(buckets)) or len(buckets)
    starts, offset = [], 0
    for slot in range(slots):
        offset = -(-offset // align) * align
        starts.append(offset)
        offset += max(sizes[bucket] for bucket in buckets[slot::slots])
    return {bucket: starts[number % slots] for number, bucket in enumerate(buckets)}, offset
