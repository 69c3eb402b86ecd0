"""Runs the allreduce benchmark: every system is checked at every size, then all take turns."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import psutil

from dpsim.dates import stamp
from dpsim.errors import CommunicationError, ConfigError
from dpsim.launch import rank_info
from dpsim.launch.resident_job import Job
from dpsim.launch.scratch import scratch
from dpsim.network import NODE
from dpsim.progress import Progress
from dpsim.records.bench import AllreduceBench, BenchRecord, Series, System
from dpsim.study.environment import environment
from dpsim.study.loop import StopRule, in_turns
from dpsim.study.runners.allreduce.algorithms import check_algorithms, label
from dpsim.study.runners.allreduce.systems import SystemLaunch, rank_argument, systems
from dpsim.units import format_size

LEAST_ROUNDS, MOST_ROUNDS = 3, 60
_LONG_VISIT_S = 0.3
_CHECKS_A_VISIT = 20  # small calls in a whole visit against those in a check
_STAMP_BYTES = 64
_Visit = dict[str, list[Any]]
"""The ``fresh`` and the ``cached`` calls of each variant in nanoseconds, and its ``wrong`` elements."""


def effort(size_bytes: int, share: float = 1.0) -> dict[str, tuple[int, int, int]]:
    """Return what a visit at one size does with each variant: (bursts, calls that count, calls before that do not).

    ``fresh`` calls find rewritten buffers, ``cached`` ones do not; ``share`` is the part for a slow system. Small
    calls come in bursts, since the call of another variant evicts their code from the caches; large ones do not.
    A burst with a cached buffer needs a call before it that fills the cache.
    """

    def part(calls: int) -> int:
        return max(2, round(calls * share))

    if size_bytes <= 64 * 2**10:
        return {"fresh": (2 if share > 0.5 else 1, part(16), 2), "cached": (1, part(16), 2)}
    if size_bytes <= 2**20:
        return {"fresh": (part(8), 1, 0), "cached": (1, part(6), 2)}
    if size_bytes <= 8 * 2**20:
        return {"fresh": (part(4), 1, 0), "cached": (1, part(3), 1)}
    return {"fresh": (2, 1, 0), "cached": (1, 1, 1)}


class _RunningSystem:
    """A system whose ranks run: its variants at each size, and the share of the effort that it makes there."""

    def __init__(self, system: System, job: Job, *, cached: bool) -> None:
        self.system, self._job, self._cached = system, job, cached
        self._variants: dict[int, list[dict[str, Any]]] = {}
        self._share: dict[int, float] = {}

    def check(self, size: int, seed: int) -> None:
        """Run every variant once at a size, and count the wrong elements of all ranks."""
        begin_s = time.monotonic()
        replies = self._job.ask({"do": "check", "size_bytes": size, "seed": seed})
        self._variants[size] = [
            {**ranks[0], "wrong": sum(variant["wrong"] for variant in ranks)}
            for ranks in zip(*(reply["variants"] for reply in replies), strict=True)
        ]
        self._share[size] = min(1.0, _LONG_VISIT_S / (time.monotonic() - begin_s) / _CHECKS_A_VISIT)

    def visit(self, size: int, seed: int) -> _Visit:
        """Time every variant at a size, on the slowest rank."""
        begin_s = time.monotonic()
        kinds = effort(size, self._share[size]) | ({} if self._cached else {"cached": (0, 0, 0)})
        replies = self._job.ask({"do": "visit", "size_bytes": size, "seed": seed} | kinds)
        self._share[size] = min(1.0, self._share[size] * _LONG_VISIT_S / (time.monotonic() - begin_s))
        return {
            kind: [np.max(ranks, axis=0).tolist() for ranks in zip(*(reply[kind] for reply in replies), strict=True)]
            for kind in ("fresh", "cached")
        } | {"wrong": np.sum([reply["wrong"] for reply in replies], axis=0).tolist()}

    def series(self, size: int, visits: Sequence[_Visit]) -> Iterator[Series]:
        """Yield the series of a size. A variant with any wrong element keeps their number, and no times.

        The algorithm that runs twice is the default one.
        """
        variants = self._variants[size]
        twice = {variant["algorithm"] for variant in variants if variant["repeat"]}
        for number, variant in enumerate(variants):
            wrong = variant["wrong"] + sum(visit["wrong"][number] for visit in visits)
            for kind in ("fresh", "cached"):
                rounds_ns = tuple(tuple(calls) for visit in visits if (calls := visit[kind][number]))
                if rounds_ns:
                    yield Series(
                        **variant | {"wrong": wrong},
                        size_bytes=size,
                        system=self.system.name,
                        cached=kind == "cached",
                        rounds_ns=() if wrong else rounds_ns,
                        default=variant["algorithm"] in twice,
                    )


def measure(bench: AllreduceBench, progress: Progress) -> BenchRecord:
    """Run the benchmark.

    Raises ``ConfigError`` for an unknown algorithm or a peer that is not installed, ``CommunicationError`` where ranks
    fail.
    """
    if rank_info.job() is not None:
        raise ConfigError(
            "the benchmark was started inside an MPI job",
            allowed="an ordinary process",
            remedy="start it without mpiexec or srun: every system starts its own ranks",
        )
    check_algorithms(bench)
    competitors = systems(bench)
    _check_memory(bench, len(competitors))
    random = np.random.default_rng(bench.seed % 2**64)
    progress(
        f"{len(bench.sizes())} sizes on {', '.join(each.system.name for each in competitors)}: every sum is checked,"
        f" and then {LEAST_ROUNDS} rounds or more are measured, with a budget of {bench.budget_s:g} s"
    )
    with contextlib.ExitStack() as stack:
        running = _started(bench, competitors, stack, progress)
        for system in running:
            progress(f"{system.system.name}: checking every size")
            for size in bench.sizes():
                system.check(size, int(random.integers(2**31)))
        measured_from = stamp()

        def visit(size: int) -> dict[str, _Visit]:
            in_order = (running[index] for index in random.permutation(len(running)))
            return {each.system.name: each.visit(size, int(random.integers(2**31))) for each in in_order}

        stop = StopRule(least_rounds=LEAST_ROUNDS, most_rounds=MOST_ROUNDS, most_s=bench.budget_s, whole_rounds=True)
        visits = {size: functools.partial(visit, size) for size in bench.sizes()}
        visited = in_turns(visits, stop, warm_up=0, seed=bench.seed, report=progress)
        return BenchRecord(
            bench=_without_folders(bench),
            environment=environment(),
            systems=tuple(system.system for system in running),
            series=tuple(
                series
                for each in running
                for size, rounds in visited.items()
                for series in each.series(size, [of_all[each.system.name] for of_all in rounds])
            ),
            measured_from=measured_from,
            measured_until=stamp(),
        )


def _without_folders(bench: AllreduceBench) -> AllreduceBench:
    """Return the benchmark without folders of this machine: its record may be published."""
    labels = tuple(label(algorithm) for algorithm in bench.algorithms)
    return msgspec.structs.replace(bench, peer_envs=dict.fromkeys(bench.peer_envs, "."), algorithms=labels)


def _check_memory(bench: AllreduceBench, count: int) -> None:
    """Raise ``ConfigError`` unless ``count`` systems fit into memory.

    Every rank of every system holds two arrays of the largest size, and those of the system that is checked three
    more. The process of a GPU checks the memory of the GPU itself.
    """
    if bench.backend == "cuda":
        return
    needed = bench.sizes()[-1] * bench.devices * (2 * count + 3)
    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"arrays of {format_size(bench.sizes()[-1])} on {bench.devices} devices in {count} systems take "
            f"{format_size(needed)}",
            allowed=f"{format_size(free)}, the memory that is free",
            remedy="give a smaller --max, fewer --devices or fewer --peers",
        )


def _started(
    bench: AllreduceBench, competitors: list[SystemLaunch], stack: contextlib.ExitStack, progress: Progress
) -> list[_RunningSystem]:
    """Start the jobs of all systems. An unnamed peer that does not start is left out, with a warning."""
    base = stack.enter_context(scratch("bench"))
    running = []
    for number, competitor in enumerate(competitors):
        progress(f"starting {competitor.system.name}")
        folder = base / str(number)
        folder.mkdir()
        handle = os.memfd_create("dpsim-bench")
        stack.callback(os.close, handle)
        os.ftruncate(handle, _STAMP_BYTES * bench.devices)
        argument = rank_argument(bench, f"/proc/{os.getpid()}/fd/{handle}")
        try:
            job = competitor.job(bench.devices, argument, folder)
        except CommunicationError as error:
            if number == 0 or bench.peers is not None:
                raise
            progress(f"warning: {competitor.system.name} takes no part: {error.given}")
            continue
        stack.callback(job.close)
        hello = {"library": job.hello["library"], "simulated": job.hello.get("simulated", False)}
        running.append(
            _RunningSystem(msgspec.structs.replace(competitor.system, **hello), job, cached=bench.network == NODE)
        )
    return running
