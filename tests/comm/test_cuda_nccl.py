"""Every call of NCCL that training makes, tried before it trains; what stands in for NCCL moves data on the host."""

from __future__ import annotations

import ctypes

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")


class OneRank:
    """CuPy's interface to NCCL between a rank and itself, on host memory. ``broken``: a call that moves nothing."""

    NCCL_UINT8, NCCL_FLOAT32, NCCL_SUM = 1, 7, 0

    def __init__(self, broken: str = "") -> None:
        self.broken, self.sent = broken, list[int]()

    def get_unique_id(self) -> bytes:
        return bytes(128)

    def NcclCommunicator(self, ranks: int, identity: bytes, rank: int) -> OneRank:
        assert (ranks, identity, rank) == (1, bytes(128), 0)
        return self

    def get_version(self) -> int:
        return 22803

    def groupStart(self) -> None:
        self.sent.clear()

    def groupEnd(self) -> None:
        assert self.sent == []

    def allReduce(self, source: int, target: int, count: int, kind: int, operation: int, stream: int) -> None:
        assert (kind, operation, stream) == (self.NCCL_FLOAT32, self.NCCL_SUM, 0)
        self._move("all-reduce", source, target, 4 * count)

    def allGather(self, own: int, first: int, count: int, kind: int, stream: int) -> None:
        self._move("all-gather", own, first, count)

    def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        self.sent.append(address)

    def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._move("send and receive", self.sent.pop(), address, count)

    def check_async_error(self) -> None:
        pass

    def destroy(self) -> None:
        pass

    def _move(self, call: str, source: int, target: int, size_bytes: int) -> None:
        if call != self.broken:
            ctypes.memmove(target, source, size_bytes)


@pytest.mark.parametrize("broken", ["", "all-reduce", "all-gather", "send and receive"])
def test_each_call_that_moves_nothing_is_named(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    from dpsim.comm.cuda import nccl
    from dpsim.comm.cuda.simulator import SimulatedDevice

    monkeypatch.setattr(nccl, "address_of", lambda array: array.ctypes.data)
    assert nccl.wrong_calls(MPI.COMM_SELF, SimulatedDevice(), OneRank(broken)) == broken
    assert nccl.version(OneRank()) == "2.28.3"
