"""``SettingSamples``: what the visits of a setting keep, as its ``MeasuredPoint`` has it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dpsim.harness.sweep.emulation import EmulationLog
from dpsim.records.sweep import MeasuredPoint
from dpsim.setting import Setting
from dpsim.study.loop import LEAST_ROUNDS
from dpsim.study.rows import TICK_DIGITS
from dpsim.study.statistics import median_interval

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
            self._by_step[name].append(round(value, TICK_DIGITS))
        for name, value in logged_s.items():
            self._logged_s.setdefault(name, []).append(round(value, TICK_DIGITS))

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

    def check(self) -> None:
        """Raise ``DpsimError`` where ranks that wait instead of computing could not keep to the emulated times."""
        self.emulation.check(self.setting, self.step_s)
