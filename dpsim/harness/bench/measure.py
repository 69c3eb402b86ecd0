"""Runs the allreduce benchmark: every system is checked at every size, then all take turns in random order."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from dpsim.errors import CommunicationError, ConfigError
from dpsim.harness.bench.algorithms import check_algorithms
from dpsim.harness.bench.entrants import Entrant, entrants, told
from dpsim.harness.measurement.environment import environment, stamp
from dpsim.launch import rank_info
from dpsim.launch.resident_job import Job
from dpsim.launch.scratch import scratch
from dpsim.progress import Progress
from dpsim.records.bench import AllreduceBench, BenchRecord, Series, System
from dpsim.units import format_size

LEAST_ROUNDS, MOST_ROUNDS = 3, 60
_LONG_VISIT_S = 0.3
_CHECKS_A_VISIT = 20  # small calls in a whole visit against those in a check
_STAMP_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Of one visit: (bursts, calls that count, calls before them) of each way, with rewritten buffers and without."""

    fresh: tuple[int, int, int]
    cached: tuple[int, int, int]


def effort(size_bytes: int, share: float = 1.0) -> Effort:
    """Small calls come in bursts, since after another's call they find their code out of the caches; large ones do not.

    A burst with a cached buffer needs a call before it that fills the cache. ``share``: how much of it, where systems
    are slow or ranks share cores.
    """

    def part(calls: int) -> int:
        return max(2, round(calls * share))

    if size_bytes <= 64 * 2**10:
        return Effort(fresh=(2 if share > 0.5 else 1, part(16), 2), cached=(1, part(16), 2))
    if size_bytes <= 2**20:
        return Effort(fresh=(part(8), 1, 0), cached=(1, part(6), 2))
    if size_bytes <= 8 * 2**20:
        return Effort(fresh=(part(4), 1, 0), cached=(1, part(3), 1))
    return Effort(fresh=(2, 1, 0), cached=(1, 1, 1))


@dataclass
class _Standing:
    """A running system: its job, and what its ways came to at each size."""

    system: System
    job: Job
    ways: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    times: dict[tuple[int, int, bool], list[tuple[int, ...]]] = field(default_factory=dict)
    share: dict[int, float] = field(default_factory=dict)


def measure(bench: AllreduceBench, progress: Progress) -> BenchRecord:
    """Run the benchmark. Raises ``ConfigError`` for what is not there, ``CommunicationError`` where ranks fail."""
    if rank_info.job() is not None:
        raise ConfigError(
            "the benchmark was started inside an MPI job",
            allowed="an ordinary process",
            remedy="start it without mpiexec or srun: every system starts its own ranks",
        )
    check_algorithms(bench)
    found = entrants(bench)
    _check_memory(bench, len(found))
    random = np.random.default_rng(bench.seed % 2**64)
    with contextlib.ExitStack() as stack:
        standings = _started(bench, found, stack, progress)
        for one in standings:
            progress(f"{one.system.name}: checking every size")
            for size in bench.sizes():
                begin_s = time.monotonic()
                replies = one.job.ask({"do": "check", "size_bytes": size, "seed": int(random.integers(2**31))})
                one.ways[size] = _added(replies)
                one.share[size] = min(1.0, _LONG_VISIT_S / (time.monotonic() - begin_s) / _CHECKS_A_VISIT)
        began = stamp()
        _rounds(bench, standings, random, progress)
        # where the peers' environments are is nobody's business but the user's
        told = msgspec.structs.replace(bench, peer_envs=dict.fromkeys(bench.peer_envs, "."))
        return BenchRecord(
            bench=told,
            environment=environment(),
            systems=tuple(one.system for one in standings),
            series=tuple(series for one in standings for series in _series(one)),
            measured_from=began,
            measured_until=stamp(),
        )


def _check_memory(bench: AllreduceBench, systems: int) -> None:
    """Every rank of every system holds two arrays of the largest size, and those being checked three more.

    Of a GPU's memory its own process keeps count.
    """
    if bench.backend == "cuda":
        return
    needed = bench.sizes()[-1] * bench.devices * (2 * systems + 3)
    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"arrays of {format_size(bench.sizes()[-1])} on {bench.devices} devices in {systems} systems take "
            f"{format_size(needed)}",
            allowed=f"{format_size(free)}, the memory that is free",
            remedy="give a smaller --max, fewer --devices or fewer --peers",
        )


def _started(
    bench: AllreduceBench, found: list[Entrant], stack: contextlib.ExitStack, progress: Progress
) -> list[_Standing]:
    """The jobs of all systems. A peer that nobody named and that does not start is left out, with a warning."""
    base = stack.enter_context(scratch("bench"))
    standings = []
    for number, entrant in enumerate(found):
        progress(f"starting {entrant.system.name}")
        folder = base / str(number)
        folder.mkdir()
        handle = os.memfd_create("dpsim-bench")
        stack.callback(os.close, handle)
        os.ftruncate(handle, _STAMP_BYTES * bench.devices)
        argument = told(bench, f"/proc/{os.getpid()}/fd/{handle}")

        def start(
            address: str, entrant: Entrant = entrant, argument: dict[str, Any] = argument, folder: Path = folder
        ) -> Any:
            return entrant.start(argument | {"socket": address}, folder)

        try:
            job = Job(entrant.system.name, entrant.processes or bench.devices, folder, start)
        except CommunicationError as error:
            if number == 0 or bench.peers is not None:
                raise
            progress(f"warning: {entrant.system.name} takes no part: {error.given}")
            continue
        stack.callback(job.close)
        hello = {"library": job.hello["library"], "simulated": job.hello.get("simulated", False)}
        standings.append(_Standing(msgspec.structs.replace(entrant.system, **hello), job))
    return standings


def _added(replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ways that every rank told, with their wrong elements added up."""
    return [
        {**ways[0], "wrong": sum(way["wrong"] for way in ways)}
        for ways in zip(*(reply["ways"] for reply in replies), strict=True)
    ]


def _rounds(bench: AllreduceBench, standings: list[_Standing], random: np.random.Generator, progress: Progress) -> None:
    """Rounds until the budget is spent, in which the systems visit every size, one after another."""
    end_s = time.monotonic() + bench.budget_s
    sizes, rounds, longest_s = bench.sizes(), 0, 0.0
    while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and time.monotonic() + longest_s < end_s):
        begin_s = time.monotonic()
        for size in random.permutation(sizes):
            for index in random.permutation(len(standings)):
                _visit(standings[index], int(size), int(random.integers(2**31)))
        rounds += 1
        longest_s = max(longest_s, time.monotonic() - begin_s)
        progress(f"round {rounds}: {time.monotonic() + bench.budget_s - end_s:.0f} of {bench.budget_s:.0f} s")


def _visit(one: _Standing, size: int, seed: int) -> None:
    amount = effort(size, one.share[size])
    command = {"do": "visit", "size_bytes": size, "seed": seed, "fresh": amount.fresh, "cached": amount.cached}
    begin_s = time.monotonic()
    replies = one.job.ask(command)
    one.share[size] = min(1.0, one.share[size] * _LONG_VISIT_S / (time.monotonic() - begin_s))
    for number, way in enumerate(one.ways[size]):
        way["wrong"] += sum(reply["wrong"][number] for reply in replies)
        for kind in ("fresh", "cached"):
            slowest = tuple(max(calls) for calls in zip(*(reply[kind][number] for reply in replies), strict=True))
            if slowest:
                one.times.setdefault((size, number, kind == "cached"), []).append(slowest)


def _series(one: _Standing) -> list[Series]:
    """What is kept: of a way that was wrong anywhere at a size, how wrong, and no times."""
    found = []
    for (size, number, cached), rounds in sorted(one.times.items()):
        way = one.ways[size][number]
        default = next((w["algorithm"] for w in one.ways[size] if w["repeat"]), None)
        found.append(
            Series(
                size_bytes=size,
                system=one.system.name,
                algorithm=way["algorithm"],
                in_place=way["in_place"],
                cached=cached,
                wrong=way["wrong"],
                rounds_ns=() if way["wrong"] else tuple(rounds),
                repeat=way["repeat"],
                default=way["algorithm"] == default,
            )
        )
    return found
