"""Explains steps that were observed on every rank of a training with DDP or FSDP, on one clock.

A step lasts from the end of one synchronising backward to the end of the next. On the rank that is the last to have its
gradients ready it is that rank's own time and what communication then leaves exposed; nobody waits for anybody else.
With FSDP on processors every rank waits for each collective: the rank that comes last to it is in it for as long as
communication takes, and the others also for that rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.model.explanation import Kind, Part
from dpsim.units import format_duration, format_size

Floats = NDArray[np.float64]
_DEVIATIONS = NormalDist().inv_cdf(0.95)
_MOST_BUCKETS = 5
_LEAST_SHARE = 0.01
_MOSTLY = 0.75
"""The share of steps in which a rank is the slowest, from which on the others wait for that one."""
_TRIMMED = 0.05
"""The share of the shortest and of the longest steps that are left out: pauses of the machine."""
LEAST_STEPS = 3
MOST_WAITED, LEAST_WAITED_S = 0.01, 50e-6
"""A clean step: of it, and in seconds, since waking up alone takes a thread some 50 us."""


class ObservedStep(Noun, frozen=True):
    """Moments and durations of one step of a rank, in seconds.

    The step begins with the end of the backward before (``began_s``); at ``computed_s`` its last gradients are ready,
    and at ``ended_s`` its backward ends. ``backward_s`` is without what is exposed. For ``delayed_s`` until
    ``computed_s`` the training thread was ready to run and had no core, of these for ``computing_delayed_s`` in
    forward, backward and update, and for ``input_delayed_s`` while it loaded (None: not known). ``ready_s`` and
    ``done_s`` are when each bucket was handed to its allreduce, and when that had ended. With FSDP ``gather_s`` and
    ``reduce_scatter_s`` are how long the rank was in each of these; the other durations are without them, and
    ``computed_s`` is ``began_s`` and all time outside of them.
    """

    began_s: float
    computed_s: float
    ended_s: float
    forward_s: float
    backward_s: float
    update_s: float
    input_s: float
    delayed_s: float = 0.0
    computing_delayed_s: float | None = None
    input_delayed_s: float | None = None
    ready_s: tuple[float, ...] = ()
    done_s: tuple[float, ...] = ()
    gather_s: tuple[float, ...] = ()
    reduce_scatter_s: tuple[float, ...] = ()


class ObservedRank(Noun, frozen=True):
    """The steps of a rank, the sizes of its buckets in the order of their allreduces, and the samples of a step.

    ``dtype`` is that of most gradients. With FSDP ``bucket_bytes`` are those of units, the script calls ``fully_shard``
    so often (``units``), and there are the sizes of the last step's gathers and reduce-scatters.
    """

    steps: tuple[ObservedStep, ...]
    bucket_bytes: tuple[int, ...]
    local_batch: int
    accumulate: int = 1
    dtype: str = "float32"
    units: int = 0
    gather_bytes: tuple[int, ...] = ()
    reduce_scatter_bytes: tuple[int, ...] = ()


class Observed(Noun, frozen=True):
    """All ranks, and what allreduces of some sizes take alone, as many at once as a step has."""

    ranks: tuple[ObservedRank, ...]
    sizes_bytes: tuple[int, ...] = ()
    time_s: tuple[float, ...] = ()


def joined(runs: Sequence[Observed]) -> Observed:
    """Return several runs of the same ranks as one, with the steps of all."""
    steps = [sum((run.ranks[rank].steps for run in runs), ()) for rank in range(len(runs[0].ranks))]
    ranks = (msgspec.structs.replace(rank, steps=own) for rank, own in zip(runs[0].ranks, steps, strict=True))
    return msgspec.structs.replace(runs[0], ranks=tuple(ranks))


class Steps:
    """Arrays (ranks, steps) of what was observed, without the shortest and the longest steps."""

    def __init__(self, observed: Observed) -> None:
        ranks = observed.ranks
        count = min(len(rank.steps) for rank in ranks)
        if count < LEAST_STEPS:
            raise ConfigError(
                f"{count} steps were observed",
                allowed=f"{LEAST_STEPS} or more",
                remedy="let the script train longer, or on more data",
            )
        self.ranks = ranks

        def table(name: str) -> Floats:
            return np.array([[getattr(step, name) for step in rank.steps[-count:]] for rank in ranks])

        def delays(name: str, unknown: Floats) -> Floats:
            delays_s = table(name).astype(float)[:, self.kept]
            return np.where(np.isnan(delays_s), unknown, delays_s)

        began_s, computed_s, ended_s = (table(name) for name in _MOMENTS)
        self.sharded = bool(ranks[0].gather_bytes)
        own_s = computed_s - began_s
        self.slowest = (own_s if self.sharded else computed_s).argmax(axis=0)
        numbers = np.arange(count)
        step_s = (ended_s - began_s)[self.slowest, numbers]
        cut = int(count * _TRIMMED)
        self.kept = np.sort(np.argsort(step_s, kind="stable")[cut : count - cut])
        self.slowest = self.slowest[self.kept]
        self.step_s = step_s[self.kept]
        self.own_s = own_s[:, self.kept]
        self.reduced_s = self.exposed_s = self.of_slowest((ended_s - computed_s)[:, self.kept])
        self.wait_s = (computed_s.max(axis=0) - computed_s)[:, self.kept]
        if self.sharded:
            self.gathered_s, self.reduced_s = (_without_waiting(ranks, count, name)[self.kept] for name in _WAITED_FOR)
            self.exposed_s = self.gathered_s + self.reduced_s
            self.wait_s = np.maximum((ended_s - computed_s)[:, self.kept] - self.exposed_s, 0.0)
        self.forward_s, self.backward_s, self.update_s, self.input_s, self.delayed_s = (
            table(name)[:, self.kept] for name in _DURATIONS
        )
        self.undelayed_s = self.own_s - self.delayed_s
        computed_s = self.forward_s + self.backward_s + self.update_s
        self.computed_s = computed_s - delays("computing_delayed_s", np.minimum(self.delayed_s, computed_s))
        self.loaded_s = np.maximum(self.input_s - delays("input_delayed_s", np.zeros_like(self.input_s)), 0.0)

    def of_slowest(self, values: Floats) -> Floats:
        """The values (ranks, steps) of the rank that each step waits for."""
        chosen: Floats = values[self.slowest, np.arange(values.shape[1])]
        return chosen

    @property
    def clean(self) -> NDArray[np.bool_] | None:
        """Which steps (ranks, steps) had a core all the time, but for what waking up takes; None: not known."""
        return self.delayed_s <= most_delayed_s(self.own_s) if self.delayed_s.any() else None

    @property
    def clean_share(self) -> str:
        """The share of the steps in which every rank had a core, in words; empty where it is not known."""
        return "" if self.clean is None else clean_words(float(self.clean.all(axis=0).mean()))

    @property
    def typical(self) -> int:
        """The rank whose own time is the lower median of all: of two the faster."""
        order = np.argsort(self.undelayed_s.mean(axis=1), kind="stable")
        return int(order[(len(order) - 1) // 2])

    @property
    def slow_rank(self) -> int | None:
        """The rank for which the others wait in most steps; None where it is now one of them, now another."""
        slow = int(self.undelayed_s.mean(axis=1).argmax())
        return slow if slow != self.typical and (self.slowest == slow).mean() >= _MOSTLY else None


def most_delayed_s(step_s: Any) -> Any:
    """Seconds for which a thread may have had no core in a clean step of so many seconds."""
    return np.maximum(MOST_WAITED * step_s, LEAST_WAITED_S)


def clean_words(share: float) -> str:
    """Say which share of the steps is clean."""
    return f", {share:.0%} of them undisturbed by other threads"


_MOMENTS = ("began_s", "computed_s", "ended_s")
_DURATIONS = ("forward_s", "backward_s", "update_s", "input_s", "delayed_s")
_WAITED_FOR = ("gather_s", "reduce_scatter_s")


def _without_waiting(ranks: Sequence[ObservedRank], count: int, name: str) -> Floats:
    """Return what the collectives of each step take without waiting: the last rank to come to one is shortest in it."""
    of_steps = zip(*(rank.steps[-count:] for rank in ranks), strict=True)
    spans = [[getattr(step, name) for step in steps] for steps in of_steps]
    same = [len({len(of_rank) for of_rank in step}) == 1 for step in spans]
    return np.array(
        [
            sum(map(min, zip(*step, strict=True))) if alike else min(map(sum, step))
            for step, alike in zip(spans, same, strict=True)
        ],
        dtype=float,
    )


def observed_parts(steps: Steps) -> list[Part]:
    """Return the parts of the mean step: the typical rank's own time, what the slowest takes longer, what is exposed.

    Contention is the time without a core of the rank that each step waits for. The rest of what that rank takes longer
    than the typical one is waiting for the slowest rank. Their sum is the mean step, but for what the typical rank does
    outside of forward, backward, update and loader. Where enough steps of that rank are clean, its computation and its
    input are those of clean steps, and by how much others take longer is contention too.
    """
    typical = steps.typical
    computed_s, input_s = steps.computed_s[typical], steps.loaded_s[typical]
    delayed_s = steps.of_slowest(steps.delayed_s)
    waited_s = steps.step_s - steps.exposed_s - delayed_s - steps.undelayed_s[typical]
    if waited_s.mean() < 0:
        delayed_s, waited_s = delayed_s + waited_s, np.zeros_like(waited_s)
    if steps.clean is not None and (clean := steps.clean[typical]).sum() >= LEAST_STEPS:
        delayed_s = delayed_s + sum(max(float(each.mean() - each[clean].mean()), 0.0) for each in (computed_s, input_s))
        computed_s, input_s = computed_s[clean], input_s[clean]
    return [
        _part("computation", computed_s, f"forward, backward and update of rank {typical}"),
        _part("input", input_s, f"the loader of rank {typical}, until it gives the next batch"),
        _part("contention", delayed_s, "a rank that could compute and had no core, because other threads had them"),
        _part("slowest rank", waited_s, *_slowest(steps)),
        _part("communication", steps.exposed_s, *_communication(steps)),
    ]


def _communication(steps: Steps) -> tuple[str, tuple[str, ...]]:
    """The text and the details of communication."""
    if not steps.sharded:
        return "allreduces that backward does not hide", exposed_buckets(steps)
    rank = steps.ranks[0]
    of_kinds = (
        ("gather", rank.gather_bytes, steps.gathered_s),
        ("reduce-scatter", rank.reduce_scatter_bytes, steps.reduced_s),
    )
    return "gathers and reduce-scatters, for each of which FSDP waits on processors", tuple(
        f"{len(sizes)} {kind}{'s' * (len(sizes) != 1)} of {of_sizes(sizes)}: {format_duration(float(seconds.mean()))}"
        for kind, sizes, seconds in of_kinds
        if sizes
    )


def of_sizes(sizes: Sequence[int]) -> str:
    """Say between which sizes these lie."""
    least, most = format_size(min(sizes)), format_size(max(sizes))
    return least if least == most else f"{least} to {most}"


def _part(kind: Kind, values: Floats, text: str, details: tuple[str, ...] = ()) -> Part:
    mean_s = float(values.mean())
    error_s = _DEVIATIONS * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Part(kind=kind, seconds=mean_s, low_s=mean_s - error_s, high_s=mean_s + error_s, text=text, details=details)


def _slowest(steps: Steps) -> tuple[str, tuple[str, ...]]:
    """The text and the details of waiting: which rank is the slowest, how often, and each rank's own times."""
    own = steps.undelayed_s.mean(axis=1)
    slowest, typical = steps.slow_rank, steps.typical
    if slowest is None:
        text = "whichever rank is the slowest in a step"
    else:
        text = (
            f"rank {slowest}, which takes {format_duration(own[slowest])} itself where rank {typical} takes"
            f" {format_duration(own[typical])}: {format_duration(own[slowest] - own[typical])} longer,"
            f" {_where(steps, slowest, typical)}"
        )
    details = tuple(
        f"rank {rank}: computes {format_duration(computed)}, loads {format_duration(loads)}, does"
        f" {format_duration(max(rest, 0.0))} else, and waits {format_duration(waits)} for the last rank"
        for rank, (computed, loads, rest, waits) in enumerate(_own_times(steps))
    )
    return text, details


def _own_times(steps: Steps) -> list[tuple[float, float, float, float]]:
    """(computation, input, anything else, waiting) of each rank."""
    computed_s = (steps.forward_s + steps.backward_s + steps.update_s).mean(axis=1)
    input_s, own_s, wait_s = (values.mean(axis=1) for values in (steps.input_s, steps.own_s, steps.wait_s))
    columns = (computed_s, input_s, own_s - computed_s - input_s, wait_s)
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in zip(*columns, strict=True)]


def _where(steps: Steps, slowest: int, typical: int) -> str:
    """Where a rank takes longer than another one: the part of its own time that grows most."""
    own = (steps.forward_s, steps.backward_s, steps.update_s, steps.input_s)
    named = dict(zip(("forward", "backward", "update", "loader"), own, strict=True))
    rest = steps.undelayed_s - sum(named.values())
    growth = {name: float((values[slowest] - values[typical]).mean()) for name, values in (named | {"": rest}).items()}
    name = max(growth, key=lambda each: growth[each])
    return f"mostly in its {name}" if name else "mostly between forward, backward, update and loader"


def exposed_buckets(steps: Steps) -> tuple[str, ...]:
    """Return a line for each of the buckets that leave most communication exposed, the largest first.

    After the last rank is ready, the time until a bucket is done counts for it from when the one before was done.
    """
    ranks, exposed = steps.ranks, dict[int, float]()
    for place, number in enumerate(steps.kept):
        rank = ranks[steps.slowest[place]]
        step = rank.steps[len(rank.steps) - _count(ranks) + int(number)]
        moment_s = step.computed_s
        for bucket in sorted(range(len(step.done_s)), key=lambda each: step.done_s[each]):
            done_s = min(max(step.done_s[bucket], moment_s), step.ended_s)
            exposed[bucket] = exposed.get(bucket, 0.0) + done_s - moment_s
            moment_s = done_s
    longest = sorted(exposed, key=lambda each: -exposed[each])[:_MOST_BUCKETS]
    sizes = ranks[0].bucket_bytes
    return tuple(
        f"bucket {bucket + 1} of {len(sizes)} ({format_size(sizes[bucket])}):"
        f" {format_duration(exposed[bucket] / len(steps.kept))}"
        for bucket in longest
        if bucket < len(sizes) and exposed[bucket] > _LEAST_SHARE * sum(exposed.values())
    )


def _count(ranks: Sequence[ObservedRank]) -> int:
    return min(len(rank.steps) for rank in ranks)
