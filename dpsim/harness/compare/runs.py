"""What a comparison needs of a run, whatever kind of record it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dpsim.harness.measurement.statistics import Interval
from dpsim.records.run_comparison import ComparedRun, SettingValue

SettingFields = tuple[tuple[str, SettingValue], ...]
"""The fields that name a setting, as pairs of name and value."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundSamples:
    """Samples in seconds, and the index of the round of each: samples of one round are not independent."""

    time_s: NDArray[np.float64]
    round: NDArray[np.intp]

    @staticmethod
    def of(time_s: Sequence[float], rounds: Sequence[int]) -> RoundSamples:
        """Return the samples of a sequence of times and one of their rounds."""
        return RoundSamples(time_s=np.array(time_s, np.float64), round=np.array(rounds, np.intp))

    @property
    def rounds(self) -> int:
        """The number of different rounds."""
        return len(np.unique(self.round))


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredSetting:
    """One setting of a run: its samples, their median as reports show it, and the run's A/A noise there.

    ``group`` is the network of a sweep's setting, and the system of a benchmark's. ``references`` names the reference
    samples of the run that were taken in the same rounds.
    """

    samples: RoundSamples
    median: Interval
    calls: int
    noise: float | None
    group: str
    emulated_network: bool
    emulated_compute: bool
    references: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredRun:
    """A run with its settings, and the times of its reference computation by name.

    Samples number the ``rounds`` of the run from 0. ``unusable`` maps settings that cannot be compared to the reason.
    """

    kind: Literal["sweep", "bench allreduce"]
    run: ComparedRun
    settings: dict[SettingFields, MeasuredSetting]
    unusable: dict[SettingFields, str]
    references: dict[str, RoundSamples]
    rounds: int
