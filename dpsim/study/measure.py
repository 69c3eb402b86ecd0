"""Measures settings in rounds until their medians are known or the budget is spent; saves samples after every round.

``dpsim.study.loop.StopRule`` decides when that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.progress import Progress
from dpsim.study.inputs import Inputs
from dpsim.study.loop import LEAST_ROUNDS, Communicator, StopRule, rounds
from dpsim.study.task import Samples

WARM_UP_ROUNDS = 2
"""Rounds that do not count: caches, buffers made when first used, the first access to every page."""
_REPORT_S = 5.0


class Visited(Protocol):
    """What the rounds of a study visit: a setting, a part of a profile, or of a calibration."""

    def visit(self, number: int, *, counted: bool) -> bool:
        """Measure a little in round ``number``, and keep it if the round is counted. Return whether it can go on."""


class KeptSamples(Protocol):
    """The samples of one visitor so far."""

    def narrow(self, interval: float) -> bool:
        """Whether the median's 95 % interval is within +- ``interval`` of it."""

    def check(self) -> None:
        """Raise ``DpsimError`` where they mean nothing."""


class Visitor(Visited, Protocol):
    """What is visited until the median of its samples is known, such as a setting that is ready to train."""

    @property
    def samples(self) -> KeptSamples:
        """The samples so far."""

    def point(self) -> Any:
        """What was measured so far, as the study's record has it."""


def measure(
    visitors: Sequence[Visitor],
    before: Samples,
    save_to: Path,
    report: Progress,
    *,
    budget_s: float,
    interval: float,
    seed: int,
    often: Sequence[Visitor] = (),
    beside: Sequence[Visited] = (),
    inputs: Callable[[], Inputs | None] = lambda: None,
    check: Callable[[], None] = lambda: None,
    comm: Communicator | None = None,
) -> Samples | None:
    """Visit every setting in every round, until all intervals are narrow, the budget is spent or one cannot go on.

    Those in ``often`` are visited again as often as they are listed, and so are those ``beside`` the settings, whose
    rows ``inputs`` returns. ``check`` raises where the samples of a round mean nothing. With ``comm`` this is
    collective; the samples are kept by rank 0, which saves them after every round and returns them.
    """
    samples: Samples | None = None
    narrow, reported_s = 0, 0.0
    measuring = rounds(
        StopRule(least_rounds=LEAST_ROUNDS, most_s=budget_s),
        suffice=lambda: narrow == len(visitors),
        warm_up=WARM_UP_ROUNDS,
        seed=seed,
        first=before.next_round,
        spent_s=before.spent_s,
        comm=comm,
        report=report,
    )
    for current in measuring:
        turns: list[Visited] = [*visitors, *often, *(beside if current.counted else ())]
        goes_on = [each.visit(current.number, counted=current.counted) for each in current.order(turns)]
        if not all(goes_on):
            break
        if not current.counted or (comm is not None and comm.rank):
            continue
        check()
        points = tuple(visitor.point() for visitor in visitors)
        samples = msgspec.structs.replace(before, points=points, spent_s=current.spent_s(), inputs=inputs())
        codec.write(save_to, samples)
        for visitor in visitors:
            visitor.samples.check()
        narrow = sum(visitor.samples.narrow(interval) for visitor in visitors)
        if now() - reported_s > _REPORT_S:
            reported_s = now()
            report(
                f"round {current.number + 1}: {narrow} of {len(visitors)} settings have intervals within "
                f"{interval:.0%}; {samples.spent_s:.0f} s used, budget {budget_s:.0f} s"
            )
    return samples
