"""What orders work in the streams of a device: two streams of which neither follows the other, and ranks that meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from late_device import LateDevice, Watched, late_devices
from mpi4py import MPI

from dpsim.comm.cuda.memory import DeviceMemory
from dpsim.comm.cuda.peer_access import writes_arrive
from dpsim.comm.cuda.transfers import HostTransfer, Piece

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install -e '.[dev]')")


@pytest.fixture
def late() -> Iterator[LateDevice]:
    with late_devices():
        yield LateDevice()


def test_two_streams_of_which_neither_follows_the_other_do_not_use_the_same_bytes(late: LateDevice) -> None:
    first, host = DeviceMemory(late), np.zeros(4, np.uint8)
    array, second = first.zeros(8), DeviceMemory(late)
    first.use()
    array[:4] = 1
    late.download(second.stream, array[4:], host)  # other bytes
    with pytest.raises(AssertionError, match=r"read in stream .* does not follow stream .* where it is written"):
        late.download(second.stream, array[2:6], host)
    second.follow(first.mark())
    late.download(second.stream, array[2:6], host)
    first.use()
    assert first.fetch([array[2:6]])[0].tolist() == [1, 1, 0, 0]  # two that read
    with pytest.raises(AssertionError, match="written in stream"):
        array[...] = 2
    second.stream.wait()  # the host orders them too
    first.use()
    array[...] = 2
    assert host.tolist() == [1, 1, 0, 0]


def test_what_is_written_to_a_device_may_change_on_the_host_afterwards(late: LateDevice) -> None:
    memory, host = DeviceMemory(late), np.arange(4.0)
    target = memory.zeros(32).view(np.float64)
    memory.write(target, host)
    host[:] = -1
    assert memory.fetch([target])[0].tolist() == [0, 1, 2, 3]


def test_host_memory_is_kept_while_the_device_copies_from_it(late: LateDevice) -> None:
    memory = DeviceMemory(late)
    late.upload(memory.stream, late.host_memory(8), memory.zeros(8))
    with pytest.raises(AssertionError, match="host memory that was given back"):
        memory.stream.wait()


def test_ranks_meet_when_what_each_wrote_into_the_others_memory_is_there(late: LateDevice) -> None:
    watched: Any = Watched(late)
    DeviceMemory(late)  # whose stream is the current one
    memory = late.share(watched, 64, "simulated")
    assert memory is not None and writes_arrive(late, watched, memory) and watched.met == 1


def test_host_memory_that_a_transfer_no_longer_needs_is_kept_until_copies_from_it_are_done(
    late: LateDevice,
) -> None:
    memory, transfer = DeviceMemory(late), HostTransfer(MPI.COMM_SELF, late)
    sizes = (8, 1024)
    outgoing, incoming = ([memory.zeros(size_bytes) for size_bytes in sizes] for _ in range(2))
    for sent in outgoing:
        sent[...] = 7
    for sent, received in zip(outgoing, incoming, strict=True):
        for pending in transfer.exchange(memory.stream, [Piece(0, sent)], [Piece(0, received)]):
            while not all(request.done() for request in pending):
                pass
        del pending  # MPI's requests hold the host's memory
    assert [set(values.tolist()) for values in memory.fetch(incoming)] == [{7}, {7}]
