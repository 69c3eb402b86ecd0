"""Tasks of the tests of groups of ranks that communicate at once, and of collectives that are waited for one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
from memory_transport import random_whole
from mpi4py import MPI

from dpsim.collective import CollectiveKind
from dpsim.comm.clock import now
from dpsim.comm.networks import transport
from dpsim.comm.progress import progress
from dpsim.comm.transport import Array, Transport, wait
from dpsim.kernels.allreduce.shards import shard_bounds
from dpsim.machine import Network
from dpsim.progress import Progress

KINDS: tuple[CollectiveKind, ...] = ("all-gather", "reduce-scatter", "allreduce", "all-gather", "reduce-scatter")
LENGTHS = (700, 5, 64, 1, 3001)
STEPS = 3


def groups(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[str]:
    """Groups of neighbours run collectives of all kinds while all ranks send messages around; what came out wrong."""
    wrong: list[str] = []
    for token in argument["networks"]:
        world = transport(comm, Network.parse(token))
        of_group = comm.Split(comm.rank // argument["of_a_group"], comm.rank)
        link = transport(of_group, world.network, world=world)
        for overlap in ("off", "inline", "poll", "thread"):
            wrong += _steps(link, world, overlap, f"{token} {overlap}")
    return [case for of_a_rank in comm.allgather(wrong) for case in of_a_rank]


def _steps(link: Transport, world: Transport, overlap: str, case: str) -> list[str]:
    """Steps in which some collectives are waited for one by one and the rest together, and messages go around."""
    wrong: list[str] = []
    copies: dict[int, Array] = {}
    data: list[Array] = []
    algorithm = "ring" if link.network.emulated else "auto"

    def copy(bucket: int, size_bytes: int, start_s: float, end_s: float) -> None:
        copies[bucket] = data[bucket].copy()

    mechanism = progress(link, algorithm, overlap, copy)
    data += [link.allocate(4 * length).view(np.float32) for length in LENGTHS]
    prepared = [mechanism.prepare(each, kind=kind) for each, kind in zip(data, KINDS, strict=True)]
    for step in range(STEPS):
        rows = [np.array(random_whole(link.size, length, "float32", 10 * step + i)) for i, length in enumerate(LENGTHS)]
        copies.clear()
        sent, coming = np.full(9, 100.0 * step + world.rank), np.empty(9)
        before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        messages = [world.receive(coming, before), world.send(sent, after)]
        for bucket, each in enumerate(data):
            each[...] = rows[bucket][link.rank]
            mechanism.submit(bucket, prepared[bucket])
        for count in range(1, 4):
            mechanism.finish_until(count)
            if set(range(count)) - set(copies):
                wrong.append(f"{case}: step {step} went on after {sorted(copies)} of the first {count}")
        wait(world, messages)
        mechanism.finish_until(len(data))
        if len(copies) != len(data):
            wrong.append(f"{case}: step {step} finished {sorted(copies)}")
        mechanism.finish()
        if not np.array_equal(coming, np.full(9, 100.0 * step + before)):
            wrong.append(f"{case}: step {step} has a wrong message {coming}")
        for bucket, kind in enumerate(KINDS):
            expected, part = _expected(rows[bucket], kind, link.rank)
            if not (np.array_equal(copies[bucket][part], expected) and np.array_equal(data[bucket][part], expected)):
                wrong.append(f"{case}: step {step} has a wrong {kind} {bucket} on rank {world.rank}")
    mechanism.close()
    return wrong


def _expected(rows: Array, kind: CollectiveKind, rank: int) -> tuple[Array, slice]:
    """What a rank has after the collective, and in which part of its array."""
    bounds, total = shard_bounds(rows.shape[1], len(rows)), rows.sum(axis=0)
    if kind == "all-gather":
        return np.concatenate([row[bounds[r] : bounds[r + 1]] for r, row in enumerate(rows)]), slice(None)
    part = slice(bounds[rank], bounds[rank + 1]) if kind == "reduce-scatter" else slice(None)
    return total[part], part


def two_transports(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, float] | None:
    """Rank 0 sends a message over each of two transports at once: when they are due at rank 1, from the sending."""
    world = transport(comm, Network.parse(argument["network"]))
    links = [world, transport(comm, world.network, world=world)]
    data = np.zeros((2, argument["size_bytes"] // 8))
    comm.Barrier()
    start_s = comm.bcast(now())
    if comm.rank == 0:
        for link, row in zip(links, data, strict=True):
            wait(link, [link.send(row, 1)])
        return comm.recv(source=1)  # type: ignore[no-any-return]
    messages = [link.receive(row, 0) for link, row in zip(links, data, strict=True)]
    for link, message in zip(links, messages, strict=True):
        wait(link, [message])
    first_s, shared_s = (float(message.due_s() or 0.0) - start_s for message in messages)
    comm.send({"first_s": first_s, "shared_s": shared_s}, 0)
    return None
