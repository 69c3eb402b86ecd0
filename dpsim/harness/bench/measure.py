"""Runs the allreduce benchmark: every system is checked at every size, then all take turns."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import psutil

from dpsim.errors import CommunicationError, ConfigError
from dpsim.launch import rank_info
from dpsim.launch.resident_job import Job
from dpsim.launch.scratch import scratch
from dpsim.progress import Progress
from dpsim.records.bench import AllreduceBench, BenchRecord, Series, System
from dpsim.study.environment import environment, stamp
from dpsim.study.loop import StopRule, rounds
from dpsim.study.runners.allreduce.algorithms import check_algorithms, label
from dpsim.study.runners.allreduce.systems import SystemLaunch, rank_argument, systems
from dpsim.units import format_size

LEAST_ROUNDS, MOST_ROUNDS = 3, 60
_LONG_VISIT_S = 0.3
_CHECKS_A_VISIT = 20  # small calls in a whole visit against those in a check
_STAMP_BYTES = 64


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


@dataclass(eq=False)
class _RunningSystem:
    """A system whose ranks run: its variants and their times at each size, and the share of the effort that it makes.

    ``times`` holds the slowest rank's nanoseconds of every call, by (size, number of the variant, whether cached) and
    round.
    """

    system: System
    job: Job
    variants: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    times: dict[tuple[int, int, bool], list[tuple[int, ...]]] = field(default_factory=dict)
    share: dict[int, float] = field(default_factory=dict)

    def check(self, size: int, seed: int) -> None:
        """Run every variant once at a size, and count the wrong elements of all ranks."""
        begin_s = time.monotonic()
        replies = self.job.ask({"do": "check", "size_bytes": size, "seed": seed})
        self.variants[size] = [
            {**ranks[0], "wrong": sum(variant["wrong"] for variant in ranks)}
            for ranks in zip(*(reply["variants"] for reply in replies), strict=True)
        ]
        self.share[size] = min(1.0, _LONG_VISIT_S / (time.monotonic() - begin_s) / _CHECKS_A_VISIT)

    def visit(self, size: int, seed: int) -> None:
        """Time every variant at a size."""
        begin_s = time.monotonic()
        replies = self.job.ask({"do": "visit", "size_bytes": size, "seed": seed} | effort(size, self.share[size]))
        self.share[size] = min(1.0, self.share[size] * _LONG_VISIT_S / (time.monotonic() - begin_s))
        for number, variant in enumerate(self.variants[size]):
            variant["wrong"] += sum(reply["wrong"][number] for reply in replies)
            for kind in ("fresh", "cached"):
                slowest = tuple(max(calls) for calls in zip(*(reply[kind][number] for reply in replies), strict=True))
                if slowest:
                    self.times.setdefault((size, number, kind == "cached"), []).append(slowest)

    def series(self) -> Iterator[Series]:
        """Yield the series to keep. A variant with any wrong element at a size keeps their number there, and no times.

        The algorithm that runs twice is the default one.
        """
        for (size, number, cached), times in sorted(self.times.items()):
            variant = self.variants[size][number]
            default = any(v["repeat"] and v["algorithm"] == variant["algorithm"] for v in self.variants[size])
            rounds_ns = () if variant["wrong"] else tuple(times)
            name = self.system.name
            yield Series(size_bytes=size, system=name, cached=cached, rounds_ns=rounds_ns, default=default, **variant)


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
        stop = StopRule(least_rounds=LEAST_ROUNDS, most_rounds=MOST_ROUNDS, most_s=bench.budget_s, whole_rounds=True)
        for current in rounds(stop, seed=bench.seed, report=progress):
            for size in current.order(bench.sizes()):
                for system in current.order(running, turn=size):
                    system.visit(size, int(random.integers(2**31)))
            progress(f"round {current.number + 1}: {current.spent_s():.0f} of {bench.budget_s:.0f} s")
        return BenchRecord(
            # the record may be published: it names no folder of this machine
            bench=msgspec.structs.replace(
                bench,
                peer_envs=dict.fromkeys(bench.peer_envs, "."),
                algorithms=tuple(label(algorithm) for algorithm in bench.algorithms),
            ),
            environment=environment(),
            systems=tuple(system.system for system in running),
            series=tuple(series for system in running for series in system.series()),
            measured_from=measured_from,
            measured_until=stamp(),
        )


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
        running.append(_RunningSystem(msgspec.structs.replace(competitor.system, **hello), job))
    return running
