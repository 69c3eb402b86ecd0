"""The lines of the table of accuracy: one for each number that is promised, from the comparisons of all sweeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from dpsim.codec import Noun
from dpsim.experiments.emulation import EmulationRecord
from dpsim.experiments.waiting import WaitingRecord
from dpsim.harness.sweep.coverage import coverage_by_stratum, covered_points
from dpsim.harness.sweep.scores import shape_score, step_score
from dpsim.machine import NODE
from dpsim.nn.tokens import norm_of
from dpsim.records.comparison import ComparedPoint, Comparison
from dpsim.records.coverage import CoveredPoint, StratumCoverage

_LOCAL, _GLOBAL = "local", "global"
Comparisons = Mapping[str, Comparison]


class Line(Noun, frozen=True):
    """A number beside its target; ``met`` is ``None`` where there are too few points to say.

    ``null`` is what the best simple guess reaches, ``noise`` what two runs of one setting differ by.
    """

    where: str
    quantity: str
    value: float | None
    target: str
    met: bool | None
    points: int
    calibrations: int
    null: float | None = None
    noise: float | None = None
    note: str = ""


def stratum(point: ComparedPoint) -> str:
    """The network and the number of devices of a point: ``emulated link, 8 devices, emulated computation``."""
    network = "this machine" if point.network == NODE else "emulated link"
    emulated = ", emulated computation" if point.emulated_compute else ""
    return f"{network}, {point.devices} device{'s' if point.devices > 1 else ''}{emulated}"


def lines(comparisons: Comparisons) -> tuple[Line, ...]:
    """All lines that can be derived from the comparisons, by name."""
    of_steps = {
        name: comparison
        for name, comparison in comparisons.items()
        if comparison.experiment.question in ("local-batch", "fusion-threshold")
    }
    return (*_of_strata(of_steps), *_of_norms(comparisons))


def _of_strata(comparisons: Comparisons) -> Iterable[Line]:
    panels: dict[str, list[tuple[str, list[ComparedPoint], Comparison]]] = {}
    for name, comparison in comparisons.items():
        groups: dict[tuple[str, str], list[ComparedPoint]] = {}
        for point in comparison.scored:
            groups.setdefault((stratum(point), point.group), []).append(point)
        for (place, _), points in groups.items():
            panels.setdefault(place, []).append((name, points, comparison))
    coverages = coverage_by_stratum(_covered(panels))
    of_place = {coverage.stratum: coverage for coverage in coverages}
    for place, members in sorted(panels.items()):
        points = [point for _, each, _ in members for point in each]
        calibrations = len({name for name, _, _ in members})
        errors = np.abs([point.error for point in points])
        scored = [point for point in points if point.null_step_s]
        nulls = _null(scored)
        noise = _median(point.noise for point in points)
        yield _line(
            place, "median error of the step", float(np.median(errors)), 0.06, points, calibrations, nulls, noise
        )
        yield _line(place, "90th percentile", float(np.percentile(errors, 90)), 0.15, points, calibrations)
        yield from _speed_lines(place, members, calibrations)
        yield _shape_line(place, members, calibrations)
        regrets = [
            (group.regret, comparison.members(group))
            for _, each, comparison in members
            for group in comparison.groups
            if group.name == each[0].group
        ]
        if regrets:
            mean = float(np.mean([regret for regret, _ in regrets]))
            worst = max(regret for regret, _ in regrets)
            line = _line(
                place, "mean regret of the predicted best", mean, 0.03, [p for _, m in regrets for p in m], calibrations
            )
            yield msgspec.structs.replace(line, note=f"{len(regrets)} panels, worst {worst:.1%}")
        if place in of_place:
            yield from _interval_lines(place, of_place[place])


def _speed_lines(
    place: str, members: Sequence[tuple[str, list[ComparedPoint], Comparison]], calibrations: int
) -> Iterator[Line]:
    """How much the machine's own speed changed, and the errors that are left where that is known."""
    points = [point for _, each, _ in members for point in each]
    errors = [abs(point.error_at_equal_speed) for point in points if point.error_at_equal_speed is not None]
    if not errors:
        return
    devices = {name: (each[0].devices, comparison) for name, each, comparison in members}
    changes = [
        abs(speed.mean_change)
        for count, comparison in devices.values()
        for speed in comparison.speeds
        if speed.devices == count
    ]
    yield Line(
        where=place,
        quantity="change of the machine's speed",
        value=_median(changes),
        target="",
        met=None,
        points=len(changes),
        calibrations=calibrations,
    )
    line = _line(place, "median error at equal speed", float(np.median(errors)), 0.06, points, calibrations)
    yield msgspec.structs.replace(line, points=len(errors))


def _interval_lines(place: str, coverage: StratumCoverage) -> Iterator[Line]:
    yield Line(
        where=place,
        quantity="coverage of the 90% interval",
        value=coverage.coverage,
        target="80 to 97%",
        met=0.8 <= coverage.coverage <= 0.97,
        points=coverage.points,
        calibrations=coverage.calibrations,
        note=f"{coverage.coverage_low:.0%} to {coverage.coverage_high:.0%} by resampled calibrations, half width "
        f"{coverage.median_width:.1%}",
    )
    yield Line(
        where=place,
        quantity="interval score",
        value=coverage.interval_score,
        target="below that of a constant width",
        met=coverage.interval_score < coverage.constant_score,
        points=coverage.points,
        calibrations=coverage.calibrations,
        null=coverage.constant_score,
        note=f"the best constant half width is {coverage.constant_width:.1%}",
    )


def _covered(panels: Mapping[str, Sequence[tuple[str, list[ComparedPoint], Comparison]]]) -> list[CoveredPoint]:
    return [
        point
        for place, members in panels.items()
        for name, points, _ in members
        for point in covered_points(points, name, place)
    ]


def _shape_line(place: str, members: Sequence[tuple[str, list[ComparedPoint], Comparison]], calibrations: int) -> Line:
    """The skill on the shape of the panels whose effect exceeds three times the noise."""
    telling = []
    for _, points, comparison in members:
        group = next((group for group in comparison.groups if group.name == points[0].group), None)
        if group is not None and group.shape_counts:
            telling.append([point for point in points if point.null_step_s])
    score = shape_score(telling)
    skill = None if score is None else score.skill
    return Line(
        where=place,
        quantity="skill on the shape",
        value=skill,
        target="0.3 or more",
        met=None if skill is None else skill >= 0.3,
        points=sum(map(len, telling)),
        calibrations=calibrations,
        note="no panel has an effect above three times the noise"
        if score is None
        else f"{len(telling)} of {len(members)} panels; error {score.median_abs_error:.1%}, best null {score.null} "
        f"{score.null_median_abs_error:.1%}",
    )


def _of_norms(comparisons: Comparisons) -> Iterable[Line]:
    """The step with each norm on several devices, and what global statistics add to it."""
    members = {name: each for name, each in comparisons.items() if each.experiment.question == "batch-norm"}
    points = [point for each in members.values() for point in each.scored if point.devices > 1]
    if not points:
        return
    errors = np.abs([point.error for point in points])
    nulls, noise = _null(points), _median(point.noise for point in points)
    yield _line(
        "batch norm", "median error of the step", float(np.median(errors)), 0.1, points, len(members), nulls, noise
    )
    at_equal_speed = [abs(point.error_at_equal_speed) for point in points if point.error_at_equal_speed is not None]
    if at_equal_speed:
        value = float(np.median(at_equal_speed))
        yield _line("batch norm", "median error at equal speed", value, 0.1, points, len(members))
    added = []
    for comparison in members.values():
        for group in comparison.groups:
            of_norm = {norm_of(p.model, p.batch_norm): p for p in comparison.members(group)}
            if _LOCAL in of_norm and _GLOBAL in of_norm:
                local, whole = of_norm[_LOCAL], of_norm[_GLOBAL]
                predicted = whole.predicted_step_s / local.predicted_step_s
                added.append(predicted / (whole.measured_step_s / local.measured_step_s) - 1)
    if added:
        line = _line(
            "batch norm",
            "error of step with global over local",
            float(np.median(np.abs(added))),
            0.1,
            points,
            len(members),
        )
        yield msgspec.structs.replace(line, points=len(added))


def emulation_lines(record: EmulationRecord) -> Iterator[Line]:
    """What emulated computation changes in a step of two ranks, where it replays the computing times of real ones."""
    changes = [each.change for each in record.replayed]
    value = float(np.median(np.abs(changes)))
    yield Line(
        where="emulated link, 2 devices",
        quantity="replayed step over real step",
        value=value,
        target="3% or less",
        met=value <= 0.03,
        points=sum(len(each.real_s) for each in record.replayed),
        calibrations=len(changes),
        note="cases: " + ", ".join(f"{change:+.1%}" for change in changes),
    )


def waiting_lines(record: WaitingRecord) -> Iterator[Line]:
    """What waiting for the slowest rank adds to a step, predicted against measured."""
    errors = [abs(each.error) for each in record.cases]
    value = float(np.median(errors))
    yield Line(
        where="emulated link, emulated computation",
        quantity="waiting for the slowest device",
        value=value,
        target="",
        met=None,
        points=sum(len(each.drawn_s) for each in record.cases),
        calibrations=len(errors),
        null=1.0,
        note="predicted and measured share of the step: "
        + ", ".join(f"{e.case.devices} devices {e.predicted:.1%} and {e.measured:.1%}" for e in record.cases),
    )


def _line(
    where: str,
    quantity: str,
    value: float,
    most: float,
    points: Sequence[ComparedPoint],
    calibrations: int,
    null: float | None = None,
    noise: float | None = None,
) -> Line:
    return Line(
        where=where,
        quantity=quantity,
        value=value,
        target=f"{most:.0%} or less",
        met=value <= most,
        points=len(points),
        calibrations=calibrations,
        null=null,
        noise=noise,
    )


def _null(points: Sequence[ComparedPoint]) -> float | None:
    """The median error of the best null that knows no measurement."""
    return step_score(points).null_median_abs_error if points else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(np.median(known)) if known else None
