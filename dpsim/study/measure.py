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
from dpsim.setting import Setting
from dpsim.study.inputs import Inputs
from dpsim.study.loop import LEAST_ROUNDS, Clock, Communicator, Round, StopRule, rounds
from dpsim.study.task import Samples
from dpsim.study.time_limit import FEWEST_ROUNDS, FEWEST_SETTINGS, Cut, cut, order_of_leaving

WARM_UP_ROUNDS = 2
"""Rounds that do not count: caches, buffers made when first used, the first access to every page."""
_REPORT_S = 5.0
_WARM_UP_SHARE = 0.25
"""The share of the time after which a warm-up that takes too long is ended."""


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
    def setting(self) -> Setting:
        """What is measured."""

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
    limit_s: float,
    interval: float,
    seed: int,
    often: Sequence[Visitor] = (),
    beside: Sequence[Visited] = (),
    inputs: Callable[[], Inputs | None] = lambda: None,
    check: Callable[[], None] = lambda: None,
    comm: Communicator | None = None,
    clock: Clock = now,
) -> Samples | None:
    """Visit every setting in every round, until all intervals are narrow, the budget is spent or one cannot go on.

    It takes ``limit_s`` at most: where the least rounds do not fit, fewer are measured, and then fewer settings, which
    the samples lack. Those in ``often`` are visited again as often as they are listed, and so are those ``beside`` the
    settings, whose rows ``inputs`` returns. ``check`` raises where the samples of a round mean nothing. With ``comm``
    this is collective; the samples are kept by rank 0, which saves them after every round and returns them.
    """
    samples: Samples | None = None
    narrow, reported_s, measured = 0, 0.0, 0
    limited = _Limited(visitors, often, beside, limit_s, report, comm)
    measuring = rounds(
        StopRule(least_rounds=LEAST_ROUNDS, most_s=budget_s, fewest_rounds=FEWEST_ROUNDS, limit_s=limit_s),
        suffice=lambda: narrow == len(limited.visitors),
        warm_up=WARM_UP_ROUNDS,
        seed=seed,
        first=before.next_round,
        spent_s=before.spent_s,
        comm=comm,
        clock=clock,
    )
    for current in measuring:
        if limited.ends_warm_up and not current.counted:
            continue
        if not limited.visit(current):
            break
        if current.number - before.next_round in (-WARM_UP_ROUNDS, 0):
            limited.cut(current, budget_s)
        if not current.counted or (comm is not None and comm.rank):
            continue
        check()
        points = tuple(visitor.point() for visitor in limited.visitors)
        samples = msgspec.structs.replace(before, points=points, spent_s=current.spent_s(), inputs=inputs())
        codec.write(save_to, samples)
        for visitor in limited.visitors:
            visitor.samples.check()
        narrow, measured = sum(visitor.samples.narrow(interval) for visitor in limited.visitors), current.number + 1
        if now() - reported_s > _REPORT_S:
            reported_s = now()
            report(
                f"round {measured}: {narrow} of {len(limited.visitors)} settings have intervals within "
                f"{interval:.0%}; {samples.spent_s:.0f} s used, budget {budget_s:.0f} s"
            )
    if samples is not None and measured < LEAST_ROUNDS and narrow < len(limited.visitors):
        report(
            f"warning: {measured} rounds were measured, where {LEAST_ROUNDS} are usual: they took "
            f"{samples.spent_s:.0f} s, and {limit_s:.0f} s is the most for this budget"
        )
    return samples


class _Limited:
    """What is visited in a round, as far as the time allows."""

    def __init__(
        self,
        visitors: Sequence[Visitor],
        often: Sequence[Visitor],
        beside: Sequence[Visited],
        limit_s: float,
        report: Progress,
        comm: Communicator | None,
    ) -> None:
        self._comm = comm
        self.visitors, self._often, self._beside = list(visitors), list(often), list(beside)
        self._limit_s, self._report = limit_s, report
        self.ends_warm_up = False
        self._taken_s: dict[Visited, float] = {}

    def visit(self, current: Round) -> bool:
        """Visit everything as often as it is listed, or once to warm up; whether all can go on.

        A process that gives the turns alone ends a warm-up early that takes too long; ranks would have to ask rank 0.
        """
        if current.counted:
            turns: list[Visited] = current.order([*self.visitors, *self._often, *self._beside])
        else:
            leaving = order_of_leaving([each.setting for each in self.visitors])
            turns = [self.visitors[index] for index in reversed(leaving)]
        self._taken_s = {}
        goes_on = []
        for number, each in enumerate(turns):
            begin_s = current.clock()
            late = current.spent_s() > _WARM_UP_SHARE * self._limit_s
            if late and not current.counted and self._comm is None and number >= FEWEST_SETTINGS:
                break
            goes_on.append(each.visit(current.number, counted=current.counted))
            self._taken_s[each] = self._taken_s.get(each, 0.0) + current.clock() - begin_s
        return all(goes_on)

    def cut(self, current: Round, budget_s: float) -> None:
        """Leave out what does not fit into the time by what this round took, and say so. Collective."""
        visited = [each for each in self.visitors if each in self._taken_s]
        decided = self._decided(current, visited) if self._comm is None or self._comm.rank == 0 else None
        if self._comm is not None:
            decided = self._comm.bcast(decided)
        assert decided is not None
        change, round_s = decided
        if not current.counted and round_s * (LEAST_ROUNDS + WARM_UP_ROUNDS) > budget_s:
            self._report(
                f"warning: a round of all settings takes about {round_s:.2g} s: measuring will take longer than the "
                f"budget of {budget_s:.3g} s, and {self._limit_s:.3g} s at most"
            )
        self.ends_warm_up = change.rounds
        if change.beside:
            self._beside = list(dict.fromkeys(self._beside))
        too_long = [visited[index] for index in change.settings]
        if left_out := [each for each in self.visitors if each in too_long or each not in visited]:
            self.visitors = [each for each in self.visitors if each not in left_out]
            self._often = [each for each in self._often if each not in left_out]
            self._report(
                f"warning: {len(left_out)} of {len(left_out) + len(self.visitors)} settings are left out, for "
                f"{FEWEST_ROUNDS} rounds of all would take longer than {self._limit_s:.3g} s; raise the budget to "
                f"measure them: {'; '.join(each.setting.describe() for each in left_out)}"
            )

    def _decided(self, current: Round, visited: Sequence[Visitor]) -> tuple[Cut, float]:
        """Return what to leave out, and the seconds of a round without that.

        What is visited beside the settings is not visited in a round that warms up, and is taken to last as long.
        """
        settings_s = [self._taken_s[each] for each in visited]
        if current.counted:
            usual_s = sum(self._taken_s[each] for each in dict.fromkeys(self._beside))
            visit_s = usual_s / max(len(self._beside), 1)
        else:
            visit_s = sum(settings_s) / len(settings_s)
            settings_s = [
                taken * (1 + self._often.count(each)) for taken, each in zip(settings_s, visited, strict=True)
            ]
            usual_s = visit_s * len(self._beside)
        beside_s = usual_s, visit_s * len({*self._beside})
        change = cut(
            settings_s,
            order_of_leaving([each.setting for each in visited]),
            beside_s,
            self._limit_s - current.spent_s(),
            usual_rounds=LEAST_ROUNDS - current.counted,
            fewest_rounds=FEWEST_ROUNDS - current.counted,
            warm_up=0 if current.counted else WARM_UP_ROUNDS - 1,
        )
        return change, sum(settings_s) + usual_s
