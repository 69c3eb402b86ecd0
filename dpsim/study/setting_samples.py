"""``SettingSamples``: what the visits of a setting keep, as its ``MeasuredPoint`` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dpsim.records.sweep import MeasuredPoint, clean_values, enough_clean
from dpsim.setting import Setting
from dpsim.study.disturbance import Judge, Mark, Seen
from dpsim.study.emulation import EmulationLog
from dpsim.study.loop import LEAST_ROUNDS
from dpsim.study.rows import TICK_DIGITS
from dpsim.study.statistics import median_interval

_BY_STEP = ("step_s", "exposed_communication_s", "round", "losses")
"""The fields of ``MeasuredPoint`` that hold a number a step."""


class SettingSamples:
    """The samples of a setting so far, those of ``earlier``, before an interruption, included."""

    def __init__(self, setting: Setting, earlier: MeasuredPoint | None, judge: Judge | None = None) -> None:
        self.setting, self._judge = setting, judge
        self._by_step: dict[str, list[Any]] = {name: list(getattr(earlier, name, ())) for name in _BY_STEP}
        self._logged_s = {name: list(values) for name, values in (earlier.logged_s if earlier else {}).items()}
        self.clean: list[Mark] = [*(earlier.clean or [None] * len(earlier.step_s))] if earlier else []
        """Whether each step is clean."""
        self.emulation = EmulationLog(earlier.emulation if earlier else None)

    @property
    def step_s(self) -> list[float]:
        """The seconds of each step."""
        return self._by_step["step_s"]

    def add(self, values: Mapping[str, float], logged_s: Mapping[str, float] = MappingProxyType({})) -> None:
        """Keep a step: its values by their fields of ``MeasuredPoint``, and what DDP logged of it."""
        for name, value in values.items():
            self._by_step[name].append(round(value, TICK_DIGITS))
        for name, value in logged_s.items():
            self._logged_s.setdefault(name, []).append(round(value, TICK_DIGITS))
        self.clean.append(None)

    def mark(self, ranks: Sequence[Seen], samples_s: Mapping[int, float]) -> None:
        """Mark the samples of a visit, which were added, by what its ranks saw; ``samples_s`` as ``Judge.marks``."""
        assert self._judge is not None
        if marks := self._judge.marks(ranks, samples_s):
            self.clean[-len(marks) :] = marks

    def point(self, **others: Any) -> MeasuredPoint:
        """The samples with the other fields of ``MeasuredPoint``; a series that some step lacks is left out."""
        whole = {name: tuple(values) for name, values in self._by_step.items() if len(values) == len(self.step_s)}
        logged_s = {name: tuple(values) for name, values in self._logged_s.items()}
        marked = any(mark is not None for mark in self.clean)
        marks = {"clean": tuple(self.clean), "disturbance_rule": self._judge.rule if self._judge else ""}
        by_step: dict[str, Any] = {"losses": ()} | whole | (marks if marked else {})
        return MeasuredPoint(
            setting=self.setting, logged_s=logged_s, emulation=self.emulation.result(), **(by_step | others)
        )

    def clean_step_s(self) -> tuple[float, ...]:
        """The seconds of the steps of which the median is: see ``clean_values``."""
        return clean_values([self])

    def narrow(self, interval: float) -> bool:
        """Whether the 95 % interval of the clean samples' median is within +- ``interval`` of it."""
        samples_s = self.clean_step_s()
        if len(samples_s) < LEAST_ROUNDS or not enough_clean([self]):
            return False
        return median_interval(samples_s, resamples=200).relative_half_width <= interval

    def check(self) -> None:
        """Raise ``DpsimError`` where ranks that wait instead of computing could not keep to the emulated times."""
        self.emulation.check(self.setting, self.clean_step_s())
