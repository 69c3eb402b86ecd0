"""Ranks that are threads of this process: messages, collectives and groups as MPI's, and errors that end all ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from dpsim.comm import local
from dpsim.comm.allreduce import prepare
from dpsim.comm.local import LocalComm, LocalRanks, RankFailed
from dpsim.comm.networks import transport
from dpsim.errors import ConfigError
from dpsim.machine import Network


def first(ranks: int, task: Any) -> Any:
    """What rank 0 yields first."""
    running = LocalRanks(ranks, task)
    try:
        return running.advance()
    finally:
        running.close()


def test_messages_of_a_pair_arrive_in_the_order_of_their_receives() -> None:
    def task(comm: LocalComm) -> Generator[Any]:
        data = [np.full(3, number, np.float32) for number in (1, 2)]
        if comm.rank:
            for each in data:
                comm.Isend(each, 0)
                each[...] = -1  # it was copied
            yield None
        into = [np.zeros(3, np.float32) for _ in data]
        requests = [comm.Irecv(each, 1) for each in into]
        for request in reversed(requests):
            while not request.Test():
                pass
        yield [each.tolist() for each in into]

    assert first(2, task) == [[1.0] * 3, [2.0] * 3]


def test_collectives_bring_copies_of_all_values() -> None:
    def task(comm: LocalComm) -> Generator[Any]:
        mine = [comm.rank]
        every = comm.allgather(mine)
        every[0].append(9)
        yield mine, every, comm.bcast(comm.rank, 2), comm.gather(comm.rank, 0), comm.gather(comm.rank, 1)

    assert first(3, task) == ([0], [[0, 9], [1], [2]], 2, [0, 1, 2], None)


def test_groups_have_the_ranks_of_a_colour_in_the_order_of_their_keys() -> None:
    def task(comm: LocalComm) -> Generator[Any]:
        group = comm.Split(comm.rank % 2, -comm.rank)
        yield group.rank, group.size, group.allgather(comm.rank), comm.Dup().allgather(comm.rank)

    assert first(5, task) == (2, 3, [4, 2, 0], [0, 1, 2, 3, 4])


def test_the_library_s_allreduce_adds_in_its_order() -> None:
    drawn = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)

    def task(comm: LocalComm) -> Generator[Any]:
        blocking, other = drawn[comm.rank].copy(), drawn[comm.rank].copy()
        comm.Allreduce(None, blocking)
        request = comm.Iallreduce(None, other)
        while not request.Test():
            pass
        yield blocking, other

    expected = (drawn[0] + drawn[1]) + (drawn[2] + drawn[3])
    assert all(np.array_equal(each, expected) for each in first(4, task))


def test_an_order_that_nobody_saw_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "native_order", lambda ranks: None)

    def task(comm: LocalComm) -> Generator[Any]:
        comm.Allreduce(None, np.zeros(3))
        yield None

    with pytest.raises(ConfigError, match="adds on 3 ranks"):
        first(3, task)


def test_an_error_of_one_rank_ends_all_and_is_the_one_that_is_raised() -> None:
    def task(comm: LocalComm) -> Generator[Any]:
        if comm.rank == 1:
            raise ConfigError("a value", allowed="another")
        comm.Barrier()
        yield None

    with pytest.raises(ConfigError, match="a value"):
        first(3, task)
    assert not issubclass(RankFailed, ConfigError)


def test_no_mpi_library_is_initialised() -> None:
    import subprocess

    code = "from dpsim.comm import local; from mpi4py import MPI; print(MPI.Is_initialized())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_rank_that_waits_elsewhere_does_not_keep_an_error_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does in a kernel, for the flag of a rank that has failed."""
    monkeypatch.setattr(local, "_GRACE_S", 0.1)
    awaited = threading.Event()

    def task(comm: LocalComm) -> Generator[Any]:
        if comm.rank == 1:
            raise ConfigError("a value", allowed="another")
        awaited.wait()
        yield None

    with pytest.raises(ConfigError, match="a value"):
        first(2, task)
    awaited.set()


def test_an_allreduce_by_messages_runs_again_and_again() -> None:
    def task(comm: LocalComm) -> Generator[Any]:
        data = np.empty(5, np.float32)
        ring, sums = prepare(transport(comm, Network()), data, "ring"), []
        for run in range(3):
            data[...] = comm.rank + run
            ring.run()
            sums.append(float(data[-1]))
        yield sums

    assert first(3, task) == [3.0, 6.0, 9.0]
