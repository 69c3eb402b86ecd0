"""Sums over ranks whose kernels do not reach each other's memory: a mover brings the pieces, a kernel adds them.

Rank r owns shard r of an array. Every rank sends each owner that shard of its partial sums; the owner's kernel adds all
partial sums along the tree, as everywhere; then all ranks gather the shards. Shards are equally long. What is left over
behind them, and all of an array that is not worth two rounds, goes from every rank to every other one, and all add it.
So the bits are those of every other layout, and of kernels in peer memory.

No kernel waits for another rank here, so NCCL may be the mover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from dpsim.comm.cuda.agreement import raise_on_all
from dpsim.comm.cuda.device import Device, DeviceArray, Stream
from dpsim.comm.cuda.movers import Mover, Piece
from dpsim.comm.cuda.reducer import Kernel, Task, own_slots
from dpsim.comm.mpi import MpiRequest
from dpsim.comm.transport import CollectiveSteps
from dpsim.errors import DpsimError
from dpsim.kernels.allreduce.cuda.arguments import address_of
from dpsim.kernels.allreduce.cuda.launch import Codes
from dpsim.kernels.allreduce.registry import find
from dpsim.kernels.allreduce.tree import PartialSums, Tree, slots_below

MOST_RECENT = 256
"""Bound tasks that are kept: a rule that packs buckets while running makes ever new ones."""

ONE_ROUND_BYTES = 16 << 10
"""An array up to this size goes to every rank as a whole: at 10 GB/s it takes 1.6 us, less than a second round."""

_PACK_BYTES = 16
_VERSION = "two-shot"
"""The version whose kernel adds, for one rank alone."""
Stage = Callable[[Any], None]


class _Bound(NamedTuple):
    """A task, ready to run: what is moved, and the stages of kernels before, between and after."""

    encode: tuple[Stage, ...]
    outgoing: tuple[Piece, ...]
    incoming: tuple[Piece, ...]
    add: tuple[Stage, ...]
    shards: tuple[DeviceArray, ...]
    decode: tuple[Stage, ...]


class _Room:
    """Device memory of one use that all tasks share, since they run one after another in one stream."""

    def __init__(self, device: Device) -> None:
        self._device, self._array = device, device.memory(0)

    def take(self, size_bytes: int) -> DeviceArray:
        """As many bytes. It grows by powers of two, and what was bound to it before keeps what it had."""
        if self._array.nbytes < size_bytes:
            self._array = self._device.memory(1 << (size_bytes - 1).bit_length())
        return self._array[:size_bytes]


class Moved:
    """See ``Reducer``: the fixed order of addition over a mover."""

    def __init__(self, comm: MPI.Intracomm, device: Device, mover: Mover, path: str) -> None:
        self._comm, self._device, self._mover = comm, device, mover
        self.path, self.how, self.queued = path, f"moved {mover.how}", mover.queued
        self._blocks: list[DeviceArray] = []
        self._bound: dict[Task, _Bound] = {}
        self._errors: dict[Kernel, DpsimError] = {}
        self._agreed: set[Kernel] = set()
        self._arriving, self._codes = _Room(device), _Room(device)

    def version(self, algorithm: str, size_bytes: int, *, sixteen_bits: bool) -> str:
        return _VERSION

    def allocate(self, size_bytes: int) -> int:
        self._blocks.append(self._device.memory(size_bytes))
        return len(self._blocks) - 1

    def own(self, number: int) -> DeviceArray:
        return self._blocks[number]

    def compile(self, task: Task) -> None:
        try:
            self._bind(task)
        except DpsimError as error:
            self._errors[task.kernel] = error

    def agree(self, task: Task) -> CollectiveSteps:
        if task.kernel in self._agreed:
            return
        failed = self._errors.get(task.kernel)
        own, every = np.array([failed is not None]), np.empty(self._comm.size, np.bool_)
        yield [MpiRequest([self._comm.Iallgather(own, every)])]
        self._device.use()
        if every.any():
            raise_on_all(self._comm, failed)
        self._agreed.add(task.kernel)

    def reduce(self, task: Task, stream: Stream) -> CollectiveSteps:
        bound = self._bound.get(task) or self._bind(task)
        self._bound[task] = self._bound.pop(task)  # the last one used
        _enqueue(bound.encode, stream)
        yield from self._mover.exchange(stream, bound.outgoing, bound.incoming)
        _enqueue(bound.add, stream)
        if bound.shards:
            yield from self._mover.all_gather(stream, bound.shards)
        _enqueue(bound.decode, stream)

    def check(self) -> None:
        self._mover.check()

    def close(self) -> None:
        self._bound.clear()
        self._mover.close()
        self._comm.Barrier()
        self._blocks.clear()

    def _bind(self, task: Task) -> _Bound:
        slots, encode, decode = self._sent(task, own_slots(self, task, self._comm.rank))
        parts = list(_parts(slots[0].size, slots[0].itemsize, self._comm.size))
        sums, rank = task.kernel.sums, self._comm.rank
        foreign = [number for number, owner in enumerate(sums.owners) if owner != rank]
        outgoing, incoming, add = list[Piece](), list[Piece](), list[Stage]()
        room = self._arriving.take(_room_bytes(parts, rank, slots[0].itemsize, len(foreign)))
        place = (address_of(slots[0]) - address_of(room)) % _PACK_BYTES  # aligned as the slots are
        for start, stop, owner in parts:
            others = [peer for peer in range(self._comm.size) if peer != rank]
            receivers = others if owner is None else [owner] if owner != rank else []
            outgoing += [Piece(to, slot[start:stop].view(np.uint8)) for to in receivers for slot in slots]
            if owner not in (None, rank):
                continue
            held = {number: slot[start:stop] for number, slot in zip(sums.of(rank), slots, strict=True)}
            for number in foreign:
                size_bytes = held[sums.of(rank)[0]].nbytes
                arriving = room[place : place + size_bytes]
                place += _padded(size_bytes)
                incoming.append(Piece(sums.owners[number], arriving))
                held[number] = arriving.view(slots[0].dtype)
            add += _addition(held, task.kernel, rank)
        shards = tuple(slots[0][start:stop].view(np.uint8) for start, stop, owner in parts if owner is not None)
        bound = _Bound(encode, tuple(outgoing), tuple(incoming), tuple(add), shards, decode)
        self._bound[task] = bound
        if len(self._bound) > MOST_RECENT:
            del self._bound[next(iter(self._bound))]
        return bound

    def _sent(
        self, task: Task, slots: Sequence[DeviceArray]
    ) -> tuple[list[DeviceArray], tuple[Stage, ...], tuple[Stage, ...]]:
        """What is sent and added of the slots, and the stages that make it of them, and the result of it."""
        if task.kernel.compression is None:
            return list(slots), (), ()
        dtype, scale = task.kernel.compression
        extent = _padded(2 * slots[0].size)
        room = self._codes.take(extent * len(slots))
        codes = [room[extent * n : extent * n + 2 * slots[0].size].view(np.uint16) for n in range(len(slots))]
        coding = Codes(dtype=dtype, scale=scale, arrays=codes)
        encode, _, decode = _two_shot(slots, _of_one_rank(_chain(len(slots))), compression=coding)
        kind = np.float16 if dtype == "float16" else np.uint16
        return [array.view(kind) for array in codes], (encode,), (decode,)


def _parts(elements: int, item_bytes: int, ranks: int) -> Iterator[tuple[int, int, int | None]]:
    """(start, stop, owner) of every part that is not empty; the owner None is everyone."""
    lanes = _PACK_BYTES // item_bytes
    shard = 0 if elements * item_bytes <= ONE_ROUND_BYTES else elements // ranks // lanes * lanes
    for owner in range(ranks if shard else 0):
        yield shard * owner, shard * (owner + 1), owner
    if shard * ranks < elements:
        yield shard * ranks, elements, None


def _room_bytes(parts: Sequence[tuple[int, int, int | None]], rank: int, item_bytes: int, foreign: int) -> int:
    added = sum(_padded((stop - start) * item_bytes) for start, stop, owner in parts if owner in (None, rank))
    return _PACK_BYTES + foreign * added


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _PACK_BYTES) * _PACK_BYTES


def _addition(held: dict[int, DeviceArray], kernel: Kernel, rank: int) -> tuple[Stage, ...]:
    """The stages that add all partial sums along the tree into this rank's first one."""
    sums = kernel.sums
    first = sums.of(rank)[0]
    places = {number: place for place, number in enumerate([first, *sorted(held.keys() - {first})])}
    return _two_shot(
        [held[number] for number in places], _of_one_rank(_renumbered(sums.tree, places)), each_sum=kernel.each_sum
    )


def _renumbered(tree: Tree, places: Mapping[int, int]) -> Tree:
    """The same tree over other numbers of its partial sums."""
    if isinstance(tree, int):
        return places[tree]
    return _renumbered(tree[0], places), _renumbered(tree[1], places)


def _of_one_rank(tree: Tree) -> PartialSums:
    """Partial sums that are all in the memory of this rank, whose result lands in the first of them."""
    return PartialSums((0,) * len(slots_below(tree)), tree)


def _chain(slots: int) -> Tree:
    """A tree over so many slots, where nothing is added."""
    tree: Tree = 0
    for number in range(1, slots):
        tree = (tree, number)
    return tree


def _two_shot(arrays: Sequence[DeviceArray], sums: PartialSums, **options: Any) -> tuple[Stage, ...]:
    """The stages of the kernel for this rank alone; none of them waits for anybody."""
    stages: tuple[Stage, ...] = find("cuda", _VERSION).make(arrays, sums, mode="split", **options).stages
    return stages


def _enqueue(stages: Sequence[Stage], stream: Stream) -> None:
    for stage in stages:
        stage(stream.launch)
