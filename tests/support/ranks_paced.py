"""Tasks of the tests of the emulated link: messages whose arrival is compared with when they are due."""

from __future__ import annotations

from typing import Any

import numpy as np
from memory_transport import random_whole
from mpi4py import MPI

from dpsim.comm.allreduce import allreduce
from dpsim.comm.broadcast import broadcast
from dpsim.comm.clock import now, sleep_until
from dpsim.comm.networks import transport
from dpsim.comm.transport import Request, Transport
from dpsim.errors import ConfigError
from dpsim.machine import Network
from dpsim.progress import Progress


def wait(message: Request) -> float:
    """Spin until it is done; when that was."""
    while not message.done():
        pass
    return now()


def one_way(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Rank 0 sends to rank 1: seconds from the sending to the arrival, by message size; then what follows from it."""
    link = transport(comm, Network.parse(argument["network"]))
    sizes: list[int] = argument["sizes_bytes"]
    took = {size: [_message(comm, link, size) for _ in range(argument["repeats"])] for size in sizes}
    long = max(sizes)
    back_to_back = [_two(comm, link, long, 0.0) for _ in range(7)]
    late_look = [_two(comm, link, long, 1.5) for _ in range(7)]
    actual = {
        "took_s": [took[size] for size in sizes],
        "back_to_back_s": back_to_back,
        "late_look_s": late_look,
        "refused": _refused(link),
    }
    return comm.gather(actual)[1] if comm.rank == 0 else comm.gather(actual)


def _message(comm: MPI.Intracomm, link: Transport, size: int) -> float:
    data = np.zeros(size // 8)
    comm.Barrier()
    if link.rank == 0:
        data[0] = now()  # the sending's own time travels with it
        wait(link.send(data, 1))
        return 0.0
    arrived = wait(link.receive(data, 0))
    return arrived - float(data[0])


def _two(comm: MPI.Intracomm, link: Transport, size: int, look_after: float) -> list[float]:
    """Arrivals of two messages sent at once, from the sending; the first look after ``look_after`` transmissions."""
    data = np.zeros((2, size // 8))
    comm.Barrier()
    if link.rank == 0:
        data[:, 0] = now()
        for message in [link.send(row, 1) for row in data]:
            wait(message)
        return [0.0, 0.0]
    messages = [link.receive(row, 0) for row in data]
    if look_after:
        look_s = now() + link.network.latency_s + look_after * size / link.network.bandwidth_bytes_per_s
        while now() < look_s:  # a sleep may end much too late on a busy machine
            pass
    return [wait(message) - float(row[0]) for message, row in zip(messages, data, strict=True)]


def _refused(link: Transport) -> bool:
    for ask in (link.native_allreduce, link.start_native_allreduce):
        try:
            ask(np.zeros(3))
        except ConfigError:
            continue
        return False
    return True


def two_senders(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[list[float]] | None:
    """Ranks 1 and 2 send to rank 0 at about one moment: (sent, sent, arrived, arrived) of each repetition."""
    link = transport(comm, Network.parse(argument["network"]))
    actual = []
    for _ in range(argument["repeats"]):
        data = np.zeros((2, argument["size_bytes"] // 8))
        begin_s = comm.bcast(now() + 4e-3)
        if link.rank:
            sleep_until(begin_s)
            data[0, 0] = now()
            wait(link.send(data[0], 0))
            continue
        messages = [link.receive(data[0], 1), link.receive(data[1], 2)]
        arrived: dict[int, float] = {}
        while len(arrived) < 2:
            for i, message in enumerate(messages):
                if i not in arrived and message.done():
                    arrived[i] = now()
        actual.append([*data[:, 0].tolist(), arrived[0], arrived[1]])
    return actual if comm.rank == 0 else None


def nodes(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Two nodes of two: seconds of messages from rank 0 inside its node and across; whether sums over both are right.

    The sums are of all algorithms, with the seconds of the slowest rank.
    """
    link = transport(comm, Network.parse(argument["network"]), 2)
    data = np.zeros(argument["size_bytes"] // 8)
    took: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(argument["repeats"]):
        for to in (1, 2):
            comm.Barrier()
            if link.rank == 0:
                data[0] = now()
                wait(link.send(data, to))
            elif link.rank == to:
                arrived = wait(link.receive(data, 0))
                took[to].append(arrived - float(data[0]))
    wrong = []
    for algorithm in ("ring", "recursive-doubling", "halving-doubling", "direct", "hierarchical"):
        rows = random_whole(comm.size, 1001, "float32", 0)
        mine = rows[comm.rank].copy()
        allreduce(link, mine, algorithm)
        if not all(comm.allgather(np.array_equal(mine, np.sum(rows, axis=0)))):
            wrong.append(algorithm)
    gathered = comm.gather(took)
    return {"inside_s": gathered[1][1], "across_s": gathered[2][2], "wrong": wrong} if gathered is not None else None


def sums(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[str] | None:
    """Point-to-point algorithms and the broadcast on an emulated network: the cases that came out wrong or early."""
    link = transport(comm, Network.parse(argument["network"]))
    wrong = []
    for algorithm in ("ring", "recursive-doubling", "halving-doubling", "direct"):
        for length in (1, comm.size - 1, 2000):
            rows = random_whole(comm.size, length, "float32", length)
            mine = rows[comm.rank].copy()
            comm.Barrier()
            start_s = now()
            allreduce(link, mine, algorithm)
            end_s = now()
            took_s = max(comm.allgather(end_s)) - max(comm.allgather(start_s))
            if took_s < link.network.latency_s:  # the last one's numbers must have reached the others
                wrong.append(f"{algorithm} of {length} came early")
            if not np.array_equal(mine, np.sum(rows, axis=0)):
                wrong.append(f"{algorithm} of {length} on rank {comm.rank}")
    data = np.full(100, float(comm.rank))
    broadcast(link, data)
    if data.any():
        wrong.append(f"broadcast on rank {comm.rank}")
    actual = comm.gather(wrong)
    return [case for of_a_rank in actual for case in of_a_rank] if actual is not None else None
