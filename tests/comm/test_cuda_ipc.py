"""CUDA IPC's rules, with a CUDA of the test's own: who opens what, at which offset, and when memory may go."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import dpsim.comm.cuda

RANKS = 3
OFFSETS = (0, 512, 4096)


class CudaError(RuntimeError):
    pass


class Comm:
    """One rank of threads that gather and meet."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._board = rank, RANKS, barrier, board

    def Barrier(self) -> None:
        log("barrier", self.rank)
        self._barrier.wait()

    def allgather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait()
        board = list(self._board)
        self._barrier.wait()
        return board


LOG: list[tuple[Any, ...]] = []
THREAD = threading.local()


def log(*what: Any) -> None:
    LOG.append(what)


def base(rank: int) -> int:
    return (rank + 1) << 32


def fake_runtime(refused: set[int]) -> SimpleNamespace:
    """Handles name an allocation's base; who opens one gets it at another address, and not in its own process."""

    def open_handle(handle: bytes) -> int:
        owner = int(handle)
        if owner == THREAD.rank or owner in refused:
            raise CudaError("invalid resource handle")
        log("open", THREAD.rank, owner)
        return base(owner) + (THREAD.rank + 1)

    def close_handle(pointer: int) -> None:
        log("close", THREAD.rank, pointer)

    def get_handle(pointer: int) -> bytes:
        if pointer % (1 << 32):
            raise CudaError("not a base")
        return b"%d" % ((pointer >> 32) - 1)

    return SimpleNamespace(
        CUDARuntimeError=CudaError,
        ipcGetMemHandle=get_handle,
        ipcOpenMemHandle=open_handle,
        ipcCloseMemHandle=close_handle,
        deviceSynchronize=lambda: log("settle", THREAD.rank),
    )


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[set[int]], list[Any]]]:
    """Runs share_device_memory on all ranks, in threads, where some ranks' memory cannot be opened."""

    def run(refused: set[int]) -> list[Any]:
        cupy: Any = ModuleType("cupy")
        cupy.uint8 = "uint8"
        cupy.cuda = SimpleNamespace(
            runtime=fake_runtime(refused),
            UnownedMemory=lambda pointer, size, owner, device: SimpleNamespace(pointer=pointer, device=device),
            MemoryPointer=lambda memory, offset: memory,
        )
        cupy.ndarray = lambda shape, dtype, memory: SimpleNamespace(
            ptr=memory.pointer, nbytes=shape[0], device=memory.device
        )
        bindings: Any = ModuleType("cuda.bindings")
        success = SimpleNamespace(name="CUDA_SUCCESS")
        bindings.driver = SimpleNamespace(
            CUresult=SimpleNamespace(CUDA_SUCCESS=success),
            cuMemGetAddressRange=lambda pointer: (success, pointer >> 32 << 32, 1 << 21),
        )
        for name, module in (("cupy", cupy), ("cuda", ModuleType("cuda")), ("cuda.bindings", bindings)):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "dpsim.comm.cuda.ipc", raising=False)
        ipc = importlib.import_module("dpsim.comm.cuda.ipc")
        LOG.clear()
        barrier, board, actual = threading.Barrier(RANKS, timeout=10), [None] * RANKS, [None] * RANKS

        def rank(number: int) -> None:
            THREAD.rank = number
            own = SimpleNamespace(data=SimpleNamespace(ptr=base(number) + OFFSETS[number]), nbytes=100, device="own")
            memory: Any = ipc.share_device_memory(Comm(number, barrier, board), own, number)  # type: ignore[arg-type]
            actual[number] = memory
            if memory is not None:
                memory.close()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return actual

    yield run
    sys.modules.pop("dpsim.comm.cuda.ipc")  # others get the real one
    del dpsim.comm.cuda.ipc  # type: ignore[attr-defined]


def test_every_rank_has_its_own_memory_as_it_is_and_the_others_at_their_offset(
    share: Callable[[set[int]], list[Any]],
) -> None:
    for rank, memory in enumerate(share(set())):
        assert memory.mapping == "ipc"
        for owner, array in enumerate(memory.ranks):
            assert array.device == ("own" if owner == rank else rank)
            if owner != rank:
                assert array.ptr == base(owner) + (rank + 1) + OFFSETS[owner]
    assert sorted(entry[1:] for entry in LOG if entry[0] == "open") == [
        (rank, owner) for rank in range(RANKS) for owner in range(RANKS) if rank != owner
    ]


def test_what_was_opened_is_closed_as_it_was_opened_before_ranks_meet(share: Callable[[set[int]], list[Any]]) -> None:
    share(set())
    for rank in range(RANKS):
        mine = [entry for entry in LOG if entry[1] == rank and entry[0] != "open"]
        closed = [("close", rank, base(owner) + rank + 1) for owner in range(RANKS) if owner != rank]
        assert mine == [("settle", rank), *closed, ("barrier", rank)]


def test_where_one_rank_cannot_open_anothers_nobody_has_shared_memory(share: Callable[[set[int]], list[Any]]) -> None:
    assert share({1}) == [None] * RANKS
    opened = sorted(entry[1:] for entry in LOG if entry[0] == "open")
    assert opened == [(1, 0), (1, 2), (2, 0)]
    assert sorted((entry[1], (entry[2] >> 32) - 1) for entry in LOG if entry[0] == "close") == opened
