"""The time and the staleness of asynchronous training, from the times of single updates: a simulation of its events.

A worker waits for the bound, pulls every shard, computes, and pushes to every shard. A shard serves one worker at a
time, first come, first served, as its lock does. Nothing else makes workers wait.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from dpsim.codec import Noun


class ServerTimes(Noun, frozen=True):
    """The seconds for which one worker has the lock of a shard: to pull it, to push to it."""

    pull_s: float
    push_s: float


class AsynchronousRun(Noun, frozen=True):
    """The seconds of all updates, and how many updates of shards were of what staleness."""

    seconds: float
    staleness: dict[int, int]


def simulate(
    compute_s: Sequence[Iterator[float]], times: ServerTimes, *, staleness: int, updates: int
) -> AsynchronousRun:
    """Simulate so many updates in all; ``compute_s[worker]`` yields the computing times of a worker in seconds.

    ``staleness`` is the bound: no worker begins an update while it has made more than so many updates more than the
    slowest one. Source of the bound: Ho et al., NIPS 2013 (stale synchronous parallel).
    """
    workers = len(compute_s)
    free_s, versions, clocks = [0.0] * workers, [0] * workers, [0] * workers
    pulled = [[0] * workers for _ in range(workers)]
    counts: Counter[int] = Counter()
    waiting: deque[int] = deque()
    taken, end_s = 0, 0.0
    events = [(0.0, number, number, -1) for number in range(workers)]  # second, sequence, worker, what it does
    sequence = workers
    while events:
        now_s, _, worker, phase = heapq.heappop(events)
        if phase < 0:  # begins
            if taken == updates:
                clocks[worker] = updates + 1
                released, waiting = [*waiting], deque()
                for each in released:
                    heapq.heappush(events, (now_s, sequence := sequence + 1, each, -1))
                continue
            if clocks[worker] - min(clocks) > staleness:
                waiting.append(worker)
                continue
            taken += 1
        elif phase == workers:  # has pulled everything
            now_s += next(compute_s[worker])
        elif phase == 2 * workers + 1:  # has pushed everything
            clocks[worker] += 1
            end_s = now_s
            for each in (*waiting, worker):
                heapq.heappush(events, (now_s, sequence := sequence + 1, each, -1))
            waiting.clear()
            continue
        else:
            pulls = phase < workers
            shard = (worker + phase - (0 if pulls else workers + 1)) % workers
            start_s = max(now_s, free_s[shard])
            free_s[shard] = now_s = start_s + (times.pull_s if pulls else times.push_s)
            if pulls:
                pulled[worker][shard] = versions[shard]
            else:
                counts[versions[shard] - pulled[worker][shard]] += 1
                versions[shard] += 1
        heapq.heappush(events, (now_s, sequence := sequence + 1, worker, phase + 1))
    return AsynchronousRun(seconds=end_s, staleness=dict(sorted(counts.items())))


def distance(one: Mapping[int, int], other: Mapping[int, int]) -> float:
    """The total variation distance of two distributions of staleness: the share of updates that would have to move."""
    totals = sum(one.values()), sum(other.values())
    return sum(abs(one.get(age, 0) / totals[0] - other.get(age, 0) / totals[1]) for age in {*one, *other}) / 2


def mean(staleness: Mapping[int, int]) -> float:
    """The mean of a distribution of staleness."""
    return sum(age * count for age, count in staleness.items()) / sum(staleness.values())
