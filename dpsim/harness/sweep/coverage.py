"""How often predicted intervals held what was measured, over many independent calibrations. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.records.comparison import ComparedPoint
from dpsim.records.coverage import CoveredPoint, StratumCoverage

Floats = NDArray[np.float64]
_RESAMPLES = 2000
_WIDTHS = 400


def covered_points(points: Sequence[ComparedPoint], calibration: str, stratum: str = "") -> tuple[CoveredPoint, ...]:
    """The points that state the level of their interval; ``calibration`` names the calibration of their predictions.

    The stratum of a point is where it ran and on how many devices, unless ``stratum`` names one for all.
    """
    return tuple(
        CoveredPoint(
            calibration=calibration,
            stratum=stratum or f"{point.setting.where}, {point.devices} device{'s' * (point.devices > 1)}",
            low_s=point.predicted_low_s,
            high_s=point.predicted_high_s,
            predicted_s=point.predicted_step_s,
            measured_s=point.measured_step_s,
        )
        for point in points
        if point.interval_level is not None
    )


def coverage_by_stratum(
    points: Sequence[CoveredPoint], level: float = 0.9, seed: int = 0
) -> tuple[StratumCoverage, ...]:
    """The coverage of each stratum, in the order in which they appear. Raises ``ConfigError`` for a wrong level."""
    if not 0 < level < 1:
        raise ConfigError(f"an interval's level is {level}", allowed="above 0 and below 1")
    strata: dict[str, list[CoveredPoint]] = {}
    for point in points:
        strata.setdefault(point.stratum, []).append(point)
    return tuple(_coverage(name, members, level, seed) for name, members in strata.items())


def by_other_studies(points: Sequence[CoveredPoint], level: float = 0.9) -> tuple[CoveredPoint, ...]:
    """Return the points with intervals that are as wide as the errors of the other studies of their stratum say.

    An interval predicted exp(-+ w) becomes predicted exp(-+ q w), where q is the quantile of
    |log(measured / predicted)| / w over the other studies. The points of a study share its error, so each of n studies
    weighs as much as the one to come: 1 / (n + 1), divided among its points (hierarchical conformal prediction: Lee,
    Barber and Willett 2023). Where there are fewer than level / (1 - level) other studies, q is infinite, and the point
    is left out.
    """
    strata: dict[str, list[CoveredPoint]] = {}
    for point in points:
        strata.setdefault(point.stratum, []).append(point)
    judged = []
    for members in strata.values():
        for study in dict.fromkeys(point.calibration for point in members):
            factor = _quantile([point for point in members if point.calibration != study], level)
            judged += [_widened(p, factor) for p in members if p.calibration == study and math.isfinite(factor)]
    return tuple(judged)


def _half_width(point: CoveredPoint) -> float:
    return math.log(point.high_s / point.low_s) / 2


def _quantile(points: Sequence[CoveredPoint], level: float) -> float:
    """The factor by which intervals were to be wider, so that the next study's hold with a probability of ``level``."""
    of_study: dict[str, list[float]] = {}
    for point in points:
        error = abs(math.log(point.measured_s / point.predicted_s))
        of_study.setdefault(point.calibration, []).append(error / max(_half_width(point), 1e-9))
    weighed = sorted((ratio, 1 / len(ratios)) for ratios in of_study.values() for ratio in ratios)
    wanted = level * (len(of_study) + 1)
    reached = 0.0
    for ratio, weight in weighed:
        reached += weight
        if reached >= wanted * (1 - 1e-12):
            return ratio
    return math.inf


def _widened(point: CoveredPoint, factor: float) -> CoveredPoint:
    apart = math.exp(factor * _half_width(point))
    return msgspec.structs.replace(point, low_s=point.predicted_s / apart, high_s=point.predicted_s * apart)


def _coverage(stratum: str, points: Sequence[CoveredPoint], level: float, seed: int) -> StratumCoverage:
    low, high, predicted, measured = np.array(
        [[point.low_s, point.high_s, point.predicted_s, point.measured_s] for point in points]
    ).T
    inside = ((low <= measured) & (measured <= high)).astype(float)
    calibrations, members = np.unique([point.calibration for point in points], return_inverse=True)
    coverage_low, coverage_high = _resampled(inside, members, len(calibrations), seed)
    constant_width, constant_score = _constant(predicted, measured, members, level)
    return StratumCoverage(
        stratum=stratum,
        level=level,
        points=len(points),
        calibrations=len(calibrations),
        coverage=float(inside.mean()),
        coverage_low=coverage_low,
        coverage_high=coverage_high,
        interval_score=float(interval_scores(low, high, measured, level).mean()),
        constant_score=constant_score,
        constant_width=constant_width,
        median_width=float(np.median(np.log(high / low))) / 2,
    )


def interval_scores(low_s: Floats, high_s: Floats, measured_s: Floats, level: float) -> Floats:
    """((high - low) + 2 / (1 - level) (low - measured where below, measured - high where above)) / measured."""
    outside = np.maximum(low_s - measured_s, 0) + np.maximum(measured_s - high_s, 0)
    scores: Floats = (high_s - low_s + 2 / (1 - level) * outside) / measured_s
    return scores


def _constant(predicted: Floats, measured: Floats, calibration: NDArray[np.int64], level: float) -> tuple[float, float]:
    """(the half width that scores best for all points, the score where each calibration has the best of the others).

    A width that is chosen on the points that it is scored on knows their errors. One calibration alone has no others:
    its score is then that of hindsight.
    """
    widths = np.linspace(0.0, float(np.max(np.abs(np.log(measured / predicted)))), _WIDTHS)
    scores = np.array([interval_scores(predicted * np.exp(-w), predicted * np.exp(w), measured, level) for w in widths])
    best = int(np.argmin(scores.sum(axis=1)))
    calibrations = np.unique(calibration)
    if len(calibrations) == 1:
        return float(widths[best]), float(scores[best].mean())
    total = 0.0
    for number in calibrations:
        own = calibration == number
        chosen = int(np.argmin(scores[:, ~own].sum(axis=1)))
        total += float(scores[chosen, own].sum())
    return float(widths[best]), total / len(measured)


def _resampled(inside: Floats, calibration: NDArray[np.int64], calibrations: int, seed: int) -> tuple[float, float]:
    """The 5 % and 95 % quantiles of the coverage over resampled calibrations, each with all of its points."""
    hits = np.bincount(calibration, inside, calibrations)
    counts = np.bincount(calibration, minlength=calibrations)
    drawn = np.random.default_rng(seed).integers(0, calibrations, (_RESAMPLES, calibrations))
    low, high = np.quantile(hits[drawn].sum(axis=1) / counts[drawn].sum(axis=1), [0.05, 0.95])
    return float(low), float(high)
