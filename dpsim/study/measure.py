"""Measures settings in rounds until their medians are known or the budget is spent; saves samples after every round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.harness.sweep.emulation import EmulationLog
from dpsim.progress import Progress
from dpsim.records.sweep import MeasuredPoint
from dpsim.setting import Setting
from dpsim.study.inputs import Inputs
from dpsim.study.loop import LEAST_ROUNDS, Communicator, StopRule, rounds
from dpsim.study.rows import TICK_DIGITS
from dpsim.study.statistics import median_interval
from dpsim.study.task import Samples

WARM_UP_ROUNDS = 2
"""Rounds that do not count: caches, buffers made when first used, the first access to every page."""
_REPORT_S = 5.0
_BY_STEP = ("step_s", "exposed_communication_s", "round", "losses")
"""The fields of ``MeasuredPoint`` that hold a number a step."""


class SettingSamples:
    """The samples of a setting so far, those of ``earlier``, before an interruption, included."""

    def __init__(self, setting: Setting, earlier: MeasuredPoint | None) -> None:
        self.setting = setting
        self._by_step: dict[str, list[Any]] = {name: list(getattr(earlier, name, ())) for name in _BY_STEP}
        self._logged_s = {name: list(values) for name, values in (earlier.logged_s if earlier else {}).items()}
        self.emulation = EmulationLog(earlier.emulation if earlier else None)

    @property
    def step_s(self) -> list[float]:
        """The seconds of each step."""
        return self._by_step["step_s"]

    def add(self, values: Mapping[str, float], logged_s: Mapping[str, float] = MappingProxyType({})) -> None:
        """Keep a step: its values by their fields of ``MeasuredPoint``, and what DDP logged of it."""
        for name, value in values.items():
            self._by_step[name].append(value if name == "losses" else round(value, TICK_DIGITS))
        for name, value in logged_s.items():
            self._logged_s.setdefault(name, []).append(value)

    def point(self, **others: Any) -> MeasuredPoint:
        """The samples with the other fields of ``MeasuredPoint``; a series that some step lacks is left out."""
        whole = {name: tuple(values) for name, values in self._by_step.items() if len(values) == len(self.step_s)}
        logged_s = {name: tuple(values) for name, values in self._logged_s.items()}
        by_step = {"losses": ()} | whole
        return MeasuredPoint(
            setting=self.setting, logged_s=logged_s, emulation=self.emulation.result(), **(by_step | others)
        )

    def narrow(self, interval: float) -> bool:
        """Whether the median's 95 % interval is within +- ``interval`` of it."""
        if len(self.step_s) < LEAST_ROUNDS:
            return False
        return median_interval(self.step_s, resamples=200).relative_half_width <= interval


class Visited(Protocol):
    """What the rounds of a study visit: a setting, a part of a profile, or of a calibration."""

    def visit(self, number: int, *, counted: bool) -> bool:
        """Measure a little in round ``number``, and keep it if the round is counted. Return whether it can go on."""


class Visitor(Visited, Protocol):
    """A setting that is ready to train."""

    samples: SettingSamples

    def point(self) -> MeasuredPoint:
        """What was measured so far."""


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
            visitor.samples.emulation.check(visitor.samples.setting, visitor.samples.step_s)
        narrow = sum(visitor.samples.narrow(interval) for visitor in visitors)
        if now() - reported_s > _REPORT_S:
            reported_s = now()
            report(
                f"round {current.number + 1}: {narrow} of {len(visitors)} settings have intervals within "
                f"{interval:.0%}; {samples.spent_s:.0f} s used, budget {budget_s:.0f} s"
            )
    return samples
