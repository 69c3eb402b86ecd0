"""Tasks of the tests of the emulated link: messages whose arrival is compared with when they are due."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from memory_transport import random_whole
from mpi4py import MPI

from dpsim.comm import paced
from dpsim.comm.allreduce import allreduce
from dpsim.comm.broadcast import broadcast
from dpsim.comm.clock import now
from dpsim.comm.networks import transport
from dpsim.comm.progress import progress
from dpsim.comm.transport import Request, Transport
from dpsim.errors import ConfigError
from dpsim.machine import Network
from dpsim.progress import Progress
from dpsim.study.runners.load import ReplicaLoad


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
    back_to_back = [_two(comm, link, long) for _ in range(7)]
    actual = {
        "took_s": [took[size] for size in sizes],
        "back_to_back_s": back_to_back,
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


def _two(comm: MPI.Intracomm, link: Transport, size: int) -> list[float]:
    """Arrivals of two messages sent at once, from the sending."""
    data = np.zeros((2, size // 8))
    comm.Barrier()
    if link.rank == 0:
        data[:, 0] = now()
        for message in [link.send(row, 1) for row in data]:
            wait(message)
        return [0.0, 0.0]
    messages = [link.receive(row, 0) for row in data]
    return [wait(message) - float(row[0]) for message, row in zip(messages, data, strict=True)]


def _refused(link: Transport) -> bool:
    for ask in (link.native_allreduce, link.start_native_allreduce):
        try:
            ask(np.zeros(3))
        except ConfigError:
            continue
        return False
    return True


def on_a_set_clock(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Messages to rank 0 of three while the link's clock is set by hand: when each is due, by that clock.

    One sender's two messages, the first looked at in time and late; then two senders' messages.
    """
    clock = {"now_s": 0.0}
    paced.now = lambda: clock["now_s"]  # type: ignore[assignment]
    network, size = Network.parse(argument["network"]), argument["size_bytes"]

    def due_s(senders: list[int], look_s: float) -> list[float] | None:
        clock["now_s"] = 0.0
        link = transport(comm, network)
        data = np.zeros((2, size // 8))
        if link.rank:
            for message in [
                link.send(row, 0) for row, sender in zip(data, senders, strict=True) if sender == link.rank
            ]:
                wait(message)
            return None
        messages = [link.receive(row, sender) for row, sender in zip(data, senders, strict=True)]
        clock["now_s"] = look_s
        return [_due_s(message, clock) for message in messages]

    late_s = network.latency_s + 1.5 * size / network.bandwidth_bytes_per_s
    actual = {"in time": due_s([1, 1], 0.0), "late": due_s([1, 1], late_s), "two senders": due_s([1, 2], 0.0)}
    return actual if comm.rank == 0 else None


def _due_s(message: Request, clock: dict[str, float]) -> float:
    """When it is due; not done just before, done then."""
    while message.due_s() is None:
        message.done()
    due_s = message.due_s()
    assert due_s is not None
    clock["now_s"] = float(np.nextafter(due_s, 0.0))
    assert not message.done()
    clock["now_s"] = due_s
    assert message.done()
    return due_s


def nodes(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Two nodes of two: messages from rank 0 inside its node and across, then sums over both nodes.

    ``due``: whether the messages were held until a time, inside and across; ``across_s``: the seconds that they took
    across; ``wrong``: algorithms whose sums came out wrong.
    """
    link = transport(comm, Network.parse(argument["network"]), 2)
    data = np.zeros(argument["size_bytes"] // 8)
    took: list[float] = []
    due = False
    for _ in range(argument["repeats"]):
        for to in (1, 2):
            comm.Barrier()
            if link.rank == 0:
                data[0] = now()
                wait(link.send(data, to))
            elif link.rank == to:
                message = link.receive(data, 0)
                took.append(wait(message) - float(data[0]))
                due = message.due_s() is not None
    wrong = []
    for algorithm in ("ring", "recursive-doubling", "halving-doubling", "direct", "hierarchical"):
        rows = random_whole(comm.size, 1001, "float32", 0)
        mine = rows[comm.rank].copy()
        allreduce(link, mine, algorithm)
        if not all(comm.allgather(np.array_equal(mine, np.sum(rows, axis=0)))):
            wrong.append(algorithm)
    gathered = comm.gather((took, due))
    if gathered is None:
        return None
    (_, inside), (across_s, across) = gathered[1:3]
    return {"across_s": across_s, "due": [inside, across], "wrong": wrong}


def beside_a_backward(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, float]:
    """Ring allreduces of two ranks while a backward runs: the fewest seconds a message, by size and overlap.

    Such an allreduce is two messages, one after the other: a message takes half of its time.
    """
    link, load = transport(comm, Network.parse(argument["network"])), ReplicaLoad("mlp:64x20", "digits", 256)
    took_s = {}
    for size, overlap in itertools.product(argument["sizes_bytes"], ("poll", "thread")):
        ends_s: list[float] = []
        mechanism = progress(link, "ring", overlap, lambda bucket, size, start_s, end_s, to=ends_s: to.append(end_s))
        allreduce_of_two_messages = mechanism.prepare(np.zeros(size // 2, np.float32))
        starts_s: list[float] = []
        for number in range(argument["repeats"]):
            comm.Barrier()
            starts_s.append(now())
            mechanism.submit(0, allreduce_of_two_messages)
            while len(ends_s) == number:
                load.run(1, mechanism.poll)
            mechanism.finish()
        mechanism.close()
        each_s = np.array(comm.allgather(ends_s)) - np.array(comm.allgather(starts_s))
        took_s[f"{size} bytes, {overlap}"] = float(each_s.min()) / 2
    return took_s


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
