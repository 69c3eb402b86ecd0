"""How often predicted intervals held what was measured, over many independent calibrations. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.grouping import grouped
from dpsim.model.residuals import Kind, Residual, conformal_factor, group_name, ratio
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison
from dpsim.records.coverage import CoveredPoint, StratumCoverage
from dpsim.records.sweep import PredictedPoint

Floats = NDArray[np.float64]
_RESAMPLES = 2000
_WIDTHS = 400


def covered_points(points: Sequence[ComparedPoint], calibration: str, stratum: str = "") -> tuple[CoveredPoint, ...]:
    """The points as intervals and what was measured; ``calibration`` names the calibration of their predictions.

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
    )


def coverage_by_stratum(points: Sequence[CoveredPoint], level: float = 0.9) -> tuple[StratumCoverage, ...]:
    """The coverage of each stratum, in the order in which they appear. Raises ``ConfigError`` for a wrong level."""
    if not 0 < level < 1:
        raise ConfigError(f"an interval's level is {level}", allowed="above 0 and below 1")
    return tuple(_coverage(name, members, level) for name, members in grouped(points, _stratum).items())


def by_other_studies(points: Sequence[CoveredPoint], level: float = 0.9) -> tuple[CoveredPoint, ...]:
    """Return the points with intervals that are as wide as the errors of the other studies of their stratum say.

    An interval from predicted exp(-d) to predicted exp(u) becomes one from predicted exp(-q d) to predicted exp(q u),
    where q is the ``conformal_factor`` of the other studies. Where there are fewer than level / (1 - level) of them, q
    is infinite, and the point is left out.
    """
    judged = []
    for members in grouped(points, _stratum).values():
        for study in dict.fromkeys(point.calibration for point in members):
            factor = conformal_factor(_ratios(p for p in members if p.calibration != study).values(), level)
            judged += [_widened(p, factor) for p in members if p.calibration == study and math.isfinite(factor)]
    return tuple(judged)


def residuals(comparison: Comparison) -> tuple[Residual, ...]:
    """How far off the predictions of a study were, blind ones and those made beforehand, by group."""
    kinds: dict[Kind, Callable[[ComparedPoint], PredictedPoint]] = {"beforehand": lambda point: point.beforehand}
    if comparison.blind_predicted_at:
        kinds["blind"] = lambda point: point.predicted
    made = []
    for kind, predicted in kinds.items():
        groups: dict[str, list[float]] = {}
        for point in comparison.scored:
            groups.setdefault(_group(point), []).append(_ratio(point.measured_step_s, predicted(point)))
        made += [
            Residual(
                study=comparison.predictions_sha256,
                kind=kind,
                group=group,
                ratios=tuple(ratios),
                measured_until=comparison.measured_until,
            )
            for group, ratios in groups.items()
        ]
    return tuple(made)


def _stratum(point: CoveredPoint) -> str:
    return point.stratum


def _group(point: ComparedPoint) -> str:
    return group_name(
        point.devices,
        point.machine,
        emulated_compute=point.emulated_compute,
        script=point.runtime != "dpsim",
    )


def _ratio(measured_s: float, predicted: PredictedPoint) -> float:
    printed = ratio(measured_s, predicted.step_s, predicted.low_s, predicted.high_s)
    return float(f"{predicted.interval_factor * printed:.4g}")


def _ratios(points: Iterable[CoveredPoint]) -> Mapping[str, list[float]]:
    of_study: dict[str, list[float]] = {}
    for point in points:
        missed = ratio(point.measured_s, point.predicted_s, point.low_s, point.high_s)
        of_study.setdefault(point.calibration, []).append(missed)
    return of_study


def _widened(point: CoveredPoint, factor: float) -> CoveredPoint:
    low_s, high_s = (point.predicted_s * (end_s / point.predicted_s) ** factor for end_s in (point.low_s, point.high_s))
    return msgspec.structs.replace(point, low_s=low_s, high_s=high_s)


def _coverage(stratum: str, points: Sequence[CoveredPoint], level: float) -> StratumCoverage:
    low, high, predicted, measured = np.array(
        [[point.low_s, point.high_s, point.predicted_s, point.measured_s] for point in points]
    ).T
    inside = ((low <= measured) & (measured <= high)).astype(float)
    calibrations, members = np.unique([point.calibration for point in points], return_inverse=True)
    coverage_low, coverage_high = _resampled(inside, members, len(calibrations))
    constant_width, constant = constant_scores(predicted, measured, members, level)
    return StratumCoverage(
        stratum=stratum,
        level=level,
        points=len(points),
        calibrations=len(calibrations),
        coverage=float(inside.mean()),
        coverage_low=coverage_low,
        coverage_high=coverage_high,
        interval_score=float(interval_scores(low, high, measured, level).mean()),
        constant_score=float(constant.mean()),
        constant_width=constant_width,
        median_width=float(np.median(np.log(high / low))) / 2,
    )


def interval_scores(low_s: Floats, high_s: Floats, measured_s: Floats, level: float) -> Floats:
    """((high - low) + 2 / (1 - level) (low - measured where below, measured - high where above)) / measured."""
    outside = np.maximum(low_s - measured_s, 0) + np.maximum(measured_s - high_s, 0)
    scores: Floats = (high_s - low_s + 2 / (1 - level) * outside) / measured_s
    return scores


def constant_scores(
    predicted: Floats, measured: Floats, calibration: NDArray[np.int64], level: float, weights: Floats | None = None
) -> tuple[float, Floats]:
    """(the half width that scores best for all points, each point's score by the best one of the other calibrations).

    A width that is chosen on the points that it is scored on knows their errors. One calibration alone has no others:
    its scores are then those of hindsight. ``weights`` are those of the points (all alike) where a width is chosen.
    """
    weight = np.ones(len(measured)) if weights is None else weights
    widths = np.linspace(0.0, float(np.max(np.abs(np.log(measured / predicted)))), _WIDTHS)
    scores = np.array([interval_scores(predicted * np.exp(-w), predicted * np.exp(w), measured, level) for w in widths])
    totals = scores @ weight
    best, calibrations = int(np.argmin(totals)), np.unique(calibration)
    chosen = scores[best].copy()
    for number in calibrations if len(calibrations) > 1 else ():
        own = calibration == number
        chosen[own] = scores[int(np.argmin(totals - scores[:, own] @ weight[own])), own]
    return float(widths[best]), chosen


def _resampled(inside: Floats, calibration: NDArray[np.int64], calibrations: int) -> tuple[float, float]:
    """The 5 % and 95 % quantiles of the coverage over resampled calibrations, each with all of its points."""
    hits = np.bincount(calibration, inside, calibrations)
    counts = np.bincount(calibration, minlength=calibrations)
    drawn = np.random.default_rng(0).integers(0, calibrations, (_RESAMPLES, calibrations))
    low, high = np.quantile(hits[drawn].sum(axis=1) / counts[drawn].sum(axis=1), [0.05, 0.95])
    return float(low), float(high)
