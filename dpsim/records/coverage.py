"""The records of how often predicted intervals held what was measured."""

from __future__ import annotations

from dpsim.codec import Noun
from dpsim.errors import ConfigError


class CoveredPoint(Noun, frozen=True):
    """A predicted interval and what was measured. Points of one ``calibration`` share its errors."""

    calibration: str
    stratum: str
    low_s: float
    high_s: float
    predicted_s: float
    measured_s: float

    def __post_init__(self) -> None:
        if not 0 < self.low_s <= self.predicted_s <= self.high_s or not self.measured_s > 0:
            raise ConfigError(
                f"{self.predicted_s} s predicted, from {self.low_s} to {self.high_s} s, {self.measured_s} s measured",
                allowed="seconds > 0, with the prediction inside its interval",
            )


class StratumCoverage(Noun, frozen=True):
    """The coverage of the intervals of one stratum, of nominal ``level``.

    - ``coverage`` is the share of points whose interval holds the measured step, ``coverage_low`` and
      ``coverage_high`` its 90 % interval from resampling whole calibrations.
    - ``interval_score`` is the mean of (high - low) + 2 / (1 - level) (distance of the measured step outside), over
      the measured step: less is better, and no interval scores better in the long run by stating another width than it
      believes (Gneiting and Raftery 2007).
    - ``constant_width`` is the relative half width w of the intervals predicted exp(-+ w) that would have scored best
      in this stratum. ``constant_score`` is the score of constant widths where that of each calibration is the best one
      of the other calibrations; with hindsight where there is only one calibration.
    - ``median_width`` is the median of the predicted half widths, log(high / low) / 2.
    """

    stratum: str
    level: float
    points: int
    calibrations: int
    coverage: float
    coverage_low: float
    coverage_high: float
    interval_score: float
    constant_score: float
    constant_width: float
    median_width: float
