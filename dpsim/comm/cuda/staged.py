"""Sums over ranks whose kernels do not reach each other's memory: a transfer brings pieces, a kernel adds them.

Rank r owns shard r of an array. Every rank sends each owner that shard of its partial sums; the owner's kernel adds all
partial sums along the tree, as everywhere; then all ranks gather the shards. Shards are equally long. What is left over
behind them, and all of an array that is not worth two rounds, goes from every rank to every other one, and all add it.
So the bits are those of every other layout, and of kernels in peer memory.

No kernel waits for another rank here, so NCCL may be the transfer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from dpsim.comm.cuda.device import Device, DeviceArray, Stream
from dpsim.comm.cuda.reducer import MOST_RECENT, Kernel, OwnBlocks, Task, agreement, own_slots
from dpsim.comm.cuda.transfers import Piece, Transfer
from dpsim.comm.transport import CollectiveSteps
from dpsim.errors import DpsimError
from dpsim.kernels.allreduce.cuda.arguments import address_of
from dpsim.kernels.allreduce.cuda.launch import Codes
from dpsim.kernels.allreduce.registry import find
from dpsim.kernels.allreduce.tree import PartialSums, Tree, slots_below

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


class _Scratch:
    """Device memory of one use that all tasks share, since they run one after another in one stream."""

    def __init__(self, device: Device) -> None:
        self._device, self._array = device, device.memory(0)

    def take(self, size_bytes: int) -> DeviceArray:
        """Return as many bytes. It grows by powers of two, and what was bound to it before keeps what it had."""
        if self._array.nbytes < size_bytes:
            self._array = self._device.memory(1 << (size_bytes - 1).bit_length())
        return self._array[:size_bytes]


class StagedAllreduce(OwnBlocks):
    """A ``Reducer`` with the fixed order of addition over a ``Transfer`` of blocks."""

    def __init__(self, comm: MPI.Intracomm, device: Device, transfer: Transfer, path: str) -> None:
        super().__init__(comm, device)
        self._transfer = transfer
        self.path, self.how, self.queued, self.check = path, f"moved {transfer.how}", transfer.queued, transfer.check
        self._bound = functools.lru_cache(MOST_RECENT)(self._bind)
        self._errors: dict[Kernel, DpsimError] = {}
        self._agreed: set[Kernel] = set()
        self._arriving, self._codes = _Scratch(device), _Scratch(device)

    def version(self, algorithm: str, size_bytes: int, *, sixteen_bits: bool) -> str:
        return _VERSION

    def compile(self, task: Task) -> None:
        try:
            self._bound(task)
        except DpsimError as error:
            self._errors[task.kernel] = error

    def agree(self, task: Task) -> CollectiveSteps:
        if task.kernel not in self._agreed:
            yield from agreement(self._comm, self._device, self._errors.get(task.kernel))
            self._agreed.add(task.kernel)

    def reduce(self, task: Task, stream: Stream) -> CollectiveSteps:
        bound = self._bound(task)
        _enqueue(bound.encode, stream)
        yield from self._transfer.exchange(stream, bound.outgoing, bound.incoming)
        _enqueue(bound.add, stream)
        if bound.shards:
            yield from self._transfer.all_gather(stream, bound.shards)
        _enqueue(bound.decode, stream)

    def close(self) -> None:
        self._bound.cache_clear()
        self._transfer.close()
        super().close()

    def _bind(self, task: Task) -> _Bound:
        slots, encode, decode = self._sent(task, own_slots(self, task, self._comm.rank))
        parts = list(_parts(slots[0].size, slots[0].itemsize, self._comm.size))
        sums, rank = task.kernel.sums, self._comm.rank
        foreign = [number for number, owner in enumerate(sums.owners) if owner != rank]
        outgoing, incoming, add = list[Piece](), list[Piece](), list[Stage]()
        scratch = self._arriving.take(_scratch_bytes(parts, rank, slots[0].itemsize, len(foreign)))
        offset = (address_of(slots[0]) - address_of(scratch)) % _PACK_BYTES  # aligned as the slots are
        for start, stop, owner in parts:
            others = [peer for peer in range(self._comm.size) if peer != rank]
            receivers = others if owner is None else [owner] if owner != rank else []
            outgoing += [Piece(to, slot[start:stop].view(np.uint8)) for to in receivers for slot in slots]
            if owner not in (None, rank):
                continue
            held = {number: slot[start:stop] for number, slot in zip(sums.of(rank), slots, strict=True)}
            size_bytes = held[sums.of(rank)[0]].nbytes
            for number in foreign:
                arriving = scratch[offset : offset + size_bytes]
                offset += _padded(size_bytes)
                incoming.append(Piece(sums.owners[number], arriving))
                held[number] = arriving.view(slots[0].dtype)
            add += _addition(held, task.kernel, rank)
        shards = tuple(slots[0][start:stop].view(np.uint8) for start, stop, owner in parts if owner is not None)
        return _Bound(encode, tuple(outgoing), tuple(incoming), tuple(add), shards, decode)

    def _sent(
        self, task: Task, slots: Sequence[DeviceArray]
    ) -> tuple[list[DeviceArray], tuple[Stage, ...], tuple[Stage, ...]]:
        """Return the partial sums to send and add, the stages that encode them, and their result."""
        if task.kernel.compression is None:
            return list(slots), (), ()
        dtype, scale = task.kernel.compression
        extent = _padded(2 * slots[0].size)
        scratch = self._codes.take(extent * len(slots))
        codes = [scratch[extent * n : extent * n + 2 * slots[0].size].view(np.uint16) for n in range(len(slots))]
        coding = Codes(dtype=dtype, scale=scale, arrays=codes)
        encode, _, decode = _two_shot(slots, _single_rank_sums(_chain(len(slots))), compression=coding)
        stored = np.float16 if dtype == "float16" else np.uint16
        return [array.view(stored) for array in codes], (encode,), (decode,)


def _parts(elements: int, item_bytes: int, ranks: int) -> Iterator[tuple[int, int, int | None]]:
    """Yield (start, stop, owner) of every part that is not empty; the owner None is everyone."""
    lanes = _PACK_BYTES // item_bytes
    shard = 0 if elements * item_bytes <= ONE_ROUND_BYTES else elements // ranks // lanes * lanes
    for owner in range(ranks if shard else 0):
        yield shard * owner, shard * (owner + 1), owner
    if shard * ranks < elements:
        yield shard * ranks, elements, None


def _scratch_bytes(parts: Sequence[tuple[int, int, int | None]], rank: int, item_bytes: int, foreign: int) -> int:
    added = sum(_padded((stop - start) * item_bytes) for start, stop, owner in parts if owner in (None, rank))
    return _PACK_BYTES + foreign * added


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _PACK_BYTES) * _PACK_BYTES


def _addition(held: dict[int, DeviceArray], kernel: Kernel, rank: int) -> tuple[Stage, ...]:
    """Return the stages that add all partial sums along the tree into this rank's first one."""
    sums = kernel.sums
    first = sums.of(rank)[0]
    indices = {number: index for index, number in enumerate([first, *sorted(held.keys() - {first})])}

    def renumbered(tree: Tree) -> Tree:
        return indices[tree] if isinstance(tree, int) else (renumbered(tree[0]), renumbered(tree[1]))

    sources = _single_rank_sums(renumbered(sums.tree))
    return _two_shot([held[number] for number in indices], sources, each_sum=kernel.each_sum)


def _single_rank_sums(tree: Tree) -> PartialSums:
    """Return partial sums that are all in the memory of this rank, whose result lands in the first of them."""
    return PartialSums((0,) * len(slots_below(tree)), tree)


def _chain(slots: int) -> Tree:
    """Return a tree over so many slots, where nothing is added."""
    return 0 if slots == 1 else (_chain(slots - 1), slots - 1)


def _two_shot(arrays: Sequence[DeviceArray], sums: PartialSums, **options: Any) -> tuple[Stage, ...]:
    """Return the stages of the kernel for this rank alone; none of them waits for anybody."""
    stages: tuple[Stage, ...] = find("cuda", _VERSION).make(arrays, sums, mode="split", **options).stages
    return stages


def _enqueue(stages: Sequence[Stage], stream: Stream) -> None:
    for stage in stages:
        stage(stream.launch)
