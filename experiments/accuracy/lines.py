"""The lines of the table of accuracy: one for each number that is promised, from the comparisons of all sweeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpsim.codec import Noun
from dpsim.experiments.emulation import EmulationRecord
from dpsim.experiments.waiting import WaitingRecord
from dpsim.harness.sweep.coverage import coverage_by_stratum, covered_points
from dpsim.harness.sweep.scores import shape_score, step_score
from dpsim.machine import NODE
from dpsim.nn.tokens import norm_of
from dpsim.records.comparison import ComparedPoint, Comparison
from dpsim.records.coverage import StratumCoverage

_STEP = "median error of the step"
_MOST_ERROR, _MOST_NORM_ERROR = 0.06, 0.1
Comparisons = Mapping[str, Comparison]


class Line(Noun, frozen=True, kw_only=True):
    """A number beside its target; ``met`` is ``None`` where there are too few points to say.

    ``null`` is what the best simple guess reaches, ``noise`` what two runs of one setting differ by.
    """

    where: str
    quantity: str
    value: float | None
    target: str = ""
    met: bool | None = None
    points: int
    calibrations: int
    null: float | None = None
    noise: float | None = None
    note: str = ""


class _Panel(NamedTuple):
    """The scored points of one group of one sweep."""

    sweep: str
    comparison: Comparison
    points: list[ComparedPoint]


def at_most(most: float, value: float) -> dict[str, Any]:
    """Return the fields of a line whose value should be no more than ``most``."""
    return {"value": value, "target": f"{most:.0%} or less", "met": value <= most}


def stratum(point: ComparedPoint) -> str:
    """Return the network and devices of a point: ``emulated link, 8 devices, emulated computation``."""
    network = "this machine" if point.network == NODE else "emulated link"
    emulated = ", emulated computation" if point.emulated_compute else ""
    return f"{network}, {point.devices} device{'s' if point.devices > 1 else ''}{emulated}"


def lines(comparisons: Comparisons) -> tuple[Line, ...]:
    """Return all lines that can be derived from the comparisons, by name."""
    panels: dict[str, list[_Panel]] = {}
    for name, comparison in comparisons.items():
        if comparison.experiment.question not in ("local-batch", "fusion-threshold"):
            continue
        groups: dict[tuple[str, str], list[ComparedPoint]] = {}
        for point in comparison.scored:
            groups.setdefault((stratum(point), point.group), []).append(point)
        for (where, _), points in groups.items():
            panels.setdefault(where, []).append(_Panel(name, comparison, points))
    covered = [
        point
        for where, members in panels.items()
        for panel in members
        for point in covered_points(panel.points, panel.sweep, where)
    ]
    coverages = {coverage.stratum: coverage for coverage in coverage_by_stratum(covered)}
    of_strata = [
        line for where in sorted(panels) for line in _stratum_lines(where, panels[where], coverages.get(where))
    ]
    return (*of_strata, *_norm_lines(comparisons))


def _stratum_lines(where: str, panels: Sequence[_Panel], coverage: StratumCoverage | None) -> Iterator[Line]:
    points = [point for panel in panels for point in panel.points]
    sweeps = len({panel.sweep for panel in panels})
    yield from _error_lines(where, points, sweeps, _MOST_ERROR, percentile=True)
    yield _shape_line(where, panels, sweeps)
    regrets = [
        (group.regret, len(panel.comparison.members(group)))
        for panel in panels
        for group in panel.comparison.groups
        if group.name == panel.points[0].group
    ]
    if regrets:
        yield Line(
            where=where,
            quantity="mean regret of the predicted best",
            **at_most(0.03, float(np.mean([regret for regret, _ in regrets]))),
            points=sum(count for _, count in regrets),
            calibrations=sweeps,
            note=f"{len(regrets)} panels, worst {max(regret for regret, _ in regrets):.1%}",
        )
    if coverage is not None:
        yield from _interval_lines(where, coverage)


def _error_lines(
    where: str, points: Sequence[ComparedPoint], sweeps: int, most: float, *, percentile: bool
) -> Iterator[Line]:
    """Yield the errors of the step against the best null that knows no measurement."""
    errors = np.abs([point.error for point in points])
    with_null = [point for point in points if point.null_step_s] if percentile else points
    counts: dict[str, Any] = {"points": len(points), "calibrations": sweeps}
    yield Line(
        where=where,
        quantity=_STEP,
        **at_most(most, float(np.median(errors))),
        **counts,
        null=step_score(with_null).null_median_abs_error if with_null else None,
        noise=_median(point.noise for point in points),
    )
    if percentile:
        yield Line(where=where, quantity="90th percentile", **at_most(0.15, float(np.percentile(errors, 90))), **counts)


def _interval_lines(where: str, coverage: StratumCoverage) -> Iterator[Line]:
    counts: dict[str, Any] = {"points": coverage.points, "calibrations": coverage.calibrations}
    yield Line(
        where=where,
        quantity="coverage of the 90% interval",
        value=coverage.coverage,
        target="80 to 97%",
        met=0.8 <= coverage.coverage <= 0.97,
        **counts,
        note=f"{coverage.coverage_low:.0%} to {coverage.coverage_high:.0%} by resampled calibrations, half width "
        f"{coverage.median_width:.1%}",
    )
    yield Line(
        where=where,
        quantity="interval score",
        value=coverage.interval_score,
        target="below that of a constant width",
        met=coverage.interval_score < coverage.constant_score,
        **counts,
        null=coverage.constant_score,
        note=f"the best constant half width is {coverage.constant_width:.1%}",
    )


def _shape_line(where: str, panels: Sequence[_Panel], sweeps: int) -> Line:
    """Return the skill on the shape of the panels whose effect exceeds three times the noise."""
    distinguishing = [
        [point for point in panel.points if point.null_step_s]
        for panel in panels
        for group in panel.comparison.groups
        if group.name == panel.points[0].group and group.shape_counts
    ]
    score = shape_score(distinguishing)
    skill = None if score is None else score.skill
    return Line(
        where=where,
        quantity="skill on the shape",
        value=skill,
        target="0.3 or more",
        met=None if skill is None else skill >= 0.3,
        points=sum(map(len, distinguishing)),
        calibrations=sweeps,
        note="no panel has an effect above three times the noise"
        if score is None
        else f"{len(distinguishing)} of {len(panels)} panels; error {score.median_abs_error:.1%}, best null "
        f"{score.null} {score.null_median_abs_error:.1%}",
    )


def _norm_lines(comparisons: Comparisons) -> Iterator[Line]:
    """Yield the step with each norm on several devices, and what global statistics add to it."""
    members = [each for each in comparisons.values() if each.experiment.question == "batch-norm"]
    points = [point for each in members for point in each.scored if point.devices > 1]
    if not points:
        return
    where, sweeps = "batch norm", len(members)
    yield from _error_lines(where, points, sweeps, _MOST_NORM_ERROR, percentile=False)
    added = []
    for comparison in members:
        for group in comparison.groups:
            by_norm = {norm_of(p.model, p.batch_norm): p for p in comparison.members(group)}
            if {"local", "global"} <= by_norm.keys():
                local, whole = by_norm["local"], by_norm["global"]
                predicted = whole.predicted_step_s / local.predicted_step_s
                added.append(abs(predicted / (whole.measured_step_s / local.measured_step_s) - 1))
    if added:
        yield Line(
            where=where,
            quantity="error of step with global over local",
            **at_most(_MOST_NORM_ERROR, float(np.median(added))),
            points=len(added),
            calibrations=sweeps,
        )


def emulation_line(record: EmulationRecord) -> Line:
    """Return what emulated computation changes in a step of two ranks that replays the times of real ones."""
    changes = [each.change for each in record.replayed]
    return Line(
        where="emulated link, 2 devices",
        quantity="replayed step over real step",
        **at_most(0.03, float(np.median(np.abs(changes)))),
        points=sum(len(each.real_s) for each in record.replayed),
        calibrations=len(changes),
        note="cases: " + ", ".join(f"{change:+.1%}" for change in changes),
    )


def waiting_line(record: WaitingRecord) -> Line:
    """Return what waiting for the slowest rank adds to a step, predicted against measured."""
    return Line(
        where="emulated link, emulated computation",
        quantity="waiting for the slowest device",
        value=float(np.median([abs(each.error) for each in record.cases])),
        points=sum(len(each.drawn_s) for each in record.cases),
        calibrations=len(record.cases),
        null=1.0,
        note="predicted and measured share of the step: "
        + ", ".join(f"{e.case.devices} devices {e.predicted:.1%} and {e.measured:.1%}" for e in record.cases),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(np.median(known)) if known else None
