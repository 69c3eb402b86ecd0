"""The time and the staleness of asynchronous training, from the times of single updates: a simulation of its events.

A worker waits for the bound, pulls, computes, and pushes to the cells that its strategy names. A cell serves one worker
at a time, first come, first served, as its lock does, and a push that averages cells waits for all of them. Nothing
else makes workers wait.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from dpsim.codec import Noun
from dpsim.strategy import Asynchronous


class AccessTimes(Noun, frozen=True):
    """The seconds for which one worker has the locks of a group of cells: to pull from it, to push to it."""

    pull_s: float
    push_s: float


class AsynchronousRun(Noun, frozen=True):
    """The seconds of all updates, and how many gradients were added to cells at what staleness."""

    seconds: float
    staleness: dict[int, int]


def simulate(
    compute_s: Sequence[Iterator[float]], times: AccessTimes, strategy: Asynchronous, updates: int
) -> AsynchronousRun:
    """Simulate so many updates in all; ``compute_s[worker]`` yields the computing times of a worker in seconds.

    Source of the bound on staleness: Ho et al., NIPS 2013 (stale synchronous parallel).
    """
    workers = len(compute_s)
    free_s, versions, clocks = [0.0] * workers, [0] * workers, [0] * workers
    groups: list[list[tuple[int, ...]]] = [[]] * workers
    pulled = [[0] * workers for _ in range(workers)]
    counts: Counter[int] = Counter()
    waiting: deque[int] = deque()
    taken, end_s = 0, 0.0
    events = [(0.0, number, number, -1) for number in range(workers)]  # second, sequence, worker, what it does
    sequence = workers
    while events:
        now_s, _, worker, phase = heapq.heappop(events)
        count = len(groups[worker])
        if phase < 0:  # begins
            if taken == updates:
                clocks[worker] = updates + 1
                released, waiting = [*waiting], deque()
                for each in released:
                    heapq.heappush(events, (now_s, sequence := sequence + 1, each, -1))
                continue
            if clocks[worker] - min(clocks) > strategy.staleness:
                waiting.append(worker)
                continue
            taken += 1
            groups[worker] = strategy.groups(worker, workers, clocks[worker])
        elif phase == count:  # has pulled everything
            now_s += next(compute_s[worker])
        elif phase == 2 * count + 1:  # has pushed everything
            clocks[worker] += 1
            end_s = now_s
            for each in (*waiting, worker):
                heapq.heappush(events, (now_s, sequence := sequence + 1, each, -1))
            waiting.clear()
            continue
        elif phase < count:
            cell = groups[worker][phase][0]
            free_s[cell] = now_s = max(now_s, free_s[cell]) + times.pull_s
            pulled[worker][cell] = versions[cell]
        else:
            group = groups[worker][phase - count - 1]
            now_s = max(now_s, *(free_s[cell] for cell in group)) + times.push_s
            counts[versions[group[0]] - pulled[worker][group[0]]] += 1
            for cell in group:
                free_s[cell], versions[cell] = now_s, versions[cell] + 1
        heapq.heappush(events, (now_s, sequence := sequence + 1, worker, phase + 1))
    return AsynchronousRun(seconds=end_s, staleness=dict(sorted(counts.items())))


def distance(one: Mapping[int, int], other: Mapping[int, int]) -> float:
    """The total variation distance of two distributions of staleness: the share of updates that would have to move."""
    totals = sum(one.values()), sum(other.values())
    return sum(abs(one.get(age, 0) / totals[0] - other.get(age, 0) / totals[1]) for age in {*one, *other}) / 2


def mean(staleness: Mapping[int, int]) -> float:
    """The mean of a distribution of staleness."""
    return sum(age * count for age, count in staleness.items()) / sum(staleness.values())
