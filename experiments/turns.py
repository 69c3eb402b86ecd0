"""Alternatives that take turns in one run, so that a machine that changes its speed changes all alike; their ratios."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from dpsim.progress import Progress, no_progress
from dpsim.study.loop import Communicator, StopRule, rounds
from dpsim.study.statistics import median_ratio

Name = TypeVar("Name", bound=Hashable)
Sample = TypeVar("Sample")


def in_turns(
    visits: Mapping[Name, Callable[[], Sample]],
    stop: StopRule,
    *,
    suffice: Callable[[Mapping[Name, Sequence[Sample]]], bool] = lambda samples: False,
    warm_up: int = 1,
    seed: int = 0,
    comm: Communicator | None = None,
    report: Progress = no_progress,
) -> dict[Name, list[Sample]]:
    """Return what the visits to each alternative return, one for each round that counts.

    In a round every alternative is visited once, in random order, until ``stop`` holds; ``suffice`` tells whether the
    samples so far do. With ``comm`` this is collective, and rank 0 decides. ``report`` gets a line after each round.
    """
    samples: dict[Name, list[Sample]] = {name: [] for name in visits}
    stopping = rounds(stop, suffice=lambda: suffice(samples), warm_up=warm_up, seed=seed, comm=comm)
    for current in stopping:
        for name in current.order(list(visits)):
            sample = visits[name]()
            if current.counted:
                samples[name].append(sample)
        if current.counted:
            report(f"round {current.number + 1}: {current.spent_s():.0f} of at most {stop.most_s:.0f} s")
    return samples


def ratio_lines(step_s: Mapping[str, Sequence[float]], base: str, limits: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each alternative: its median, and its ratio to ``base`` with its 95 % interval."""
    for name, taken_s in step_s.items():
        over = median_ratio(taken_s, step_s[base])
        limit = f"  limit {limits[name]:.2f}" if name in limits else ""
        yield (
            f"  {name:<30} {np.median(taken_s) * 1e3:9.3f} ms  {over.median:.3f}"
            f"  ({over.low:.3f} to {over.high:.3f}){limit}"
        )
