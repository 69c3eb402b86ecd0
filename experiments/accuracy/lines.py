"""The lines of the table of accuracy: one for each number that is promised, from all that was measured."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dpsim.codec import Noun
from dpsim.experiments import emulation, waiting
from dpsim.experiments.cases import Record
from dpsim.harness.sweep.coverage import by_other_studies, coverage_by_stratum, covered_points
from dpsim.harness.sweep.scores import shape_score, step_score
from dpsim.machine import NODE
from dpsim.nn.tokens import norm_of
from dpsim.records.comparison import ComparedPoint, Comparison
from dpsim.records.coverage import CoveredPoint, StratumCoverage
from dpsim.records.quality import QualityResults

STEP = "median error of the step"
_MOST_ERROR, _MOST_P90, _MOST_BATCH_ERROR = 0.06, 0.06, 0.03
_MOST_NORM_ERROR, _MOST_RATIO_ERROR = 0.04, 0.1
_MOST_IN_A_SWEEP = {"this machine": (0.015, 0.03), "emulated link": (0.015, 0.025)}
"""The most that a sweep's median error should be, with one device and with two, by network."""
_ENOUGH_SWEEPS, _MOST_UNDECIDED = 0.9, 1 / 3
_LEAST_SKILL, _LEAST_SHAPE_SKILL = 0.5, 0.6
_MOST_REGRET, _WORST_REGRET = 0.02, 0.05
_LEVEL, _EVERYWHERE = 0.9, "everywhere"
_PREDICTED = "predicted"
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

    @property
    def group(self) -> Any:
        """Return what was derived of the group; None for one of a single point."""
        return next((group for group in self.comparison.groups if group.name == self.points[0].group), None)


def _at_most(most: float, value: float) -> dict[str, Any]:
    """Return the fields of a line whose value should be no more than ``most``."""
    return {"value": value, "target": f"{most:.0%} or less", "met": value <= most}


def stratum(point: ComparedPoint) -> str:
    """Return the network and devices of a point: ``emulated link, 8 devices, emulated computation``."""
    network = "this machine" if point.network == NODE else "emulated link"
    emulated = ", emulated computation" if point.emulated_compute else ""
    return f"{network}, {point.devices} device{'s' if point.devices > 1 else ''}{emulated}"


def lines(comparisons: Comparisons) -> Iterator[Line]:
    """Yield all lines that can be derived from the comparisons, by name."""
    panels: dict[str, list[_Panel]] = {}
    for name, comparison in comparisons.items():
        if comparison.experiment.question not in ("local-batch", "fusion-threshold"):
            continue
        groups: dict[tuple[str, str], list[ComparedPoint]] = {}
        for point in comparison.scored:
            groups.setdefault((stratum(point), point.group), []).append(point)
        for (where, _), points in groups.items():
            panels.setdefault(where, []).append(_Panel(name, comparison, points))
    coverages = {coverage.stratum: coverage for coverage in _coverages(comparisons)}
    for where in sorted(panels):
        yield from _stratum_lines(where, panels[where])
        if where in coverages:
            yield from _interval_lines(coverages[where])
    over_batches = [each for each in comparisons.values() if each.experiment.question == "local-batch"]
    if computed := _groups(over_batches, lambda point: not point.emulated_compute):
        sweeps = sum(any(not point.emulated_compute for point in each.scored) for each in over_batches)
        yield _step_line("local batch", computed, sweeps, _MOST_BATCH_ERROR)
    yield from _norm_lines(comparisons)
    if _EVERYWHERE in coverages:
        yield from _interval_lines(coverages[_EVERYWHERE])


def _stratum_lines(where: str, panels: Sequence[_Panel]) -> Iterator[Line]:
    points = [point for panel in panels for point in panel.points]
    sweeps = len({panel.sweep for panel in panels})
    line = functools.partial(Line, where=where, calibrations=sweeps)
    yield _step_line(where, [panel.points for panel in panels], sweeps, _MOST_ERROR)
    if not points[0].emulated_compute:
        yield _sweeps_line(where, panels)
    percentile = float(np.percentile(np.abs([point.error for point in points]), 90))
    yield line(quantity="90th percentile", **_at_most(_MOST_P90, percentile), points=len(points))
    if (skill := _skill_line(where, panels)) is not None:
        yield skill
    yield _shape_line(where, panels, sweeps)
    if grouped := [panel for panel in panels if panel.group is not None]:
        regrets = [panel.group.regret for panel in grouped]
        mean, worst = float(np.mean(regrets)), max(regrets)
        yield line(
            quantity="mean regret of the predicted best",
            value=mean,
            target=f"{_MOST_REGRET:.0%} or less, worst {_WORST_REGRET:.0%}",
            met=mean <= _MOST_REGRET and worst <= _WORST_REGRET,
            points=sum(len(panel.comparison.members(panel.group)) for panel in grouped),
            note=f"{len(regrets)} panels, worst {worst:.1%}",
        )


def _sweeps_line(where: str, panels: Sequence[_Panel]) -> Line:
    """Return the share of sweeps whose own median error is small enough.

    A sweep in which two runs of one setting differ by more than that says nothing: it is undecided.
    """
    most = _MOST_IN_A_SWEEP[where.split(",")[0]][panels[0].points[0].devices > 1]
    errors = [_median(abs(point.error) for point in panel.points) for panel in panels]
    noises = [max((point.noise or 0.0 for point in panel.points), default=0.0) for panel in panels]
    decided = [error for error, noise in zip(errors, noises, strict=True) if noise <= most]
    undecided = 1 - len(decided) / len(errors)
    share = float(np.mean([error <= most for error in decided])) if decided else None
    return Line(
        where=where,
        quantity=f"sweeps with a median error of {most:.1%} or less",
        value=share,
        target=f"{_ENOUGH_SWEEPS:.0%} or more",
        met=None if share is None else share >= _ENOUGH_SWEEPS and undecided <= _MOST_UNDECIDED,
        points=sum(len(panel.points) for panel in panels),
        calibrations=len(decided),
        note=f"{len(errors) - len(decided)} more sweeps are undecided: two runs of one setting differ by more; "
        f"median of all sweeps {_median(errors):.1%}, worst {max(errors):.1%}",
    )


def _skill_line(where: str, panels: Sequence[_Panel]) -> Line | None:
    """Return the skill on step time of each group of several devices whose settings differ by more than the noise."""
    groups = [panel.group for panel in panels if panel.group is not None and panel.points[0].devices > 1]
    skills = [group.step.skill for group in groups if not group.below_noise and group.step.skill is not None]
    if not skills:
        return None
    share = float(np.mean([skill >= _LEAST_SKILL for skill in skills]))
    return Line(
        where=where,
        quantity=f"sweeps with a skill on step time of {_LEAST_SKILL} or more",
        value=share,
        target=f"{_ENOUGH_SWEEPS:.0%} or more, all above 0",
        met=share >= _ENOUGH_SWEEPS and min(skills) > 0,
        points=sum(group.points for group in groups),
        calibrations=len(skills),
        note=f"median {_median(skills):.2f}, worst {min(skills):.2f}; {sum(skill > 0 for skill in skills)} of "
        f"{len(skills)} above 0",
    )


def covered(comparisons: Comparisons) -> tuple[CoveredPoint, ...]:
    """Return all scored points with intervals as wide as the errors of the other sweeps of their stratum call for.

    Points of a stratum with too few other sweeps are left out.
    """
    stated = [
        of_stratum
        for name, comparison in comparisons.items()
        for point in comparison.scored
        for of_stratum in covered_points([point], name, stratum(point))
    ]
    return by_other_studies(stated, _LEVEL)


def _coverages(comparisons: Comparisons) -> list[StratumCoverage]:
    """Return how often the intervals of ``covered`` hold what was measured: by stratum, and all."""
    points = covered(comparisons)
    everywhere = [msgspec.structs.replace(each, stratum=_EVERYWHERE) for each in points]
    return [*coverage_by_stratum(points, _LEVEL), *coverage_by_stratum(everywhere, _LEVEL)]


def _interval_lines(coverage: StratumCoverage) -> Iterator[Line]:
    line = functools.partial(Line, where=coverage.stratum, points=coverage.points, calibrations=coverage.calibrations)
    yield line(
        quantity="coverage of the 90% interval",
        value=coverage.coverage,
        target="90% within its own interval",
        met=coverage.coverage_low <= _LEVEL <= coverage.coverage_high,
        note=f"{coverage.coverage_low:.0%} to {coverage.coverage_high:.0%} by resampled sweeps, half width "
        f"{coverage.median_width:.1%}",
    )
    yield line(
        quantity="interval score",
        value=coverage.interval_score,
        target="below that of a constant width",
        met=coverage.interval_score < coverage.constant_score,
        null=coverage.constant_score,
        note=f"the best constant half width is {coverage.constant_width:.1%}",
    )


def _step_line(where: str, groups: Sequence[Sequence[ComparedPoint]], sweeps: int, most: float) -> Line:
    """Return the error of the step in groups of sweeps, against the null that is best in each group."""
    points = list(itertools.chain(*groups))
    noises = [p.noise for p in points if p.noise is not None and math.isfinite(p.noise)]
    null_errors: list[float] = []
    for of_group in groups:
        if with_null := [point for point in of_group if point.null_step_s]:
            best = step_score(with_null).null
            null_errors += [abs(point.null_step_s[best] / point.measured_step_s - 1) for point in with_null]
    return Line(
        where=where,
        quantity=STEP,
        **_at_most(most, _median(abs(point.error) for point in points)),
        points=len(points),
        calibrations=sweeps,
        null=_median(null_errors) if null_errors else None,
        noise=_median(noises) if noises else None,
        note=f"made beforehand {_median(abs(point.beforehand_error) for point in points):.1%}",
    )


def _groups(members: Iterable[Comparison], wanted: Callable[[ComparedPoint], bool]) -> list[list[ComparedPoint]]:
    """Return the scored points of each group of each sweep that are wanted."""
    groups: dict[tuple[int, str], list[ComparedPoint]] = {}
    for number, comparison in enumerate(members):
        for point in filter(wanted, comparison.scored):
            groups.setdefault((number, point.group), []).append(point)
    return list(groups.values())


def _shape_line(where: str, panels: Sequence[_Panel], sweeps: int) -> Line:
    """Return the skill on the shape of the panels whose effect exceeds three times the noise."""
    distinguishing = [
        [point for point in panel.points if point.null_step_s]
        for panel in panels
        if panel.group is not None and panel.group.shape_counts
    ]
    score = shape_score(distinguishing)
    skill = None if score is None else score.skill
    return Line(
        where=where,
        quantity="skill on the shape",
        value=skill,
        target=f"{_LEAST_SHAPE_SKILL} or more",
        met=None if skill is None else skill >= _LEAST_SHAPE_SKILL,
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
    groups = _groups(members, lambda point: point.devices > 1)
    if not groups:
        return
    yield _step_line("batch norm", groups, len(members), _MOST_NORM_ERROR)
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
            where="batch norm",
            quantity="error of step with global over local",
            **_at_most(_MOST_RATIO_ERROR, _median(added)),
            points=len(added),
            calibrations=len(members),
        )


def emulation_line(record: Record[emulation.Case]) -> Line:
    """Return what emulated computation changes in a step of two ranks that replays the times of real ones."""
    changes = [emulation.change(each) for each in record.measured]
    return Line(
        where="emulated link, 2 devices",
        quantity="replayed step over real step",
        **_at_most(0.03, _median(map(abs, changes))),
        points=sum(len(each.samples["real_s"]) for each in record.measured),
        calibrations=len(changes),
        note="cases: " + ", ".join(f"{change:+.1%}" for change in changes),
    )


def waiting_line(record: Record[waiting.Case]) -> Line:
    """Return what waiting for the slowest rank adds to a step, predicted against measured."""
    shares = ((e.case.devices, waiting.predicted_share(e), waiting.measured_share(e)) for e in record.measured)
    return Line(
        where="emulated link, emulated computation",
        quantity="waiting for the slowest device",
        value=_median(abs(waiting.error(each)) for each in record.measured),
        points=sum(len(each.samples["drawn_s"]) for each in record.measured),
        calibrations=len(record.measured),
        null=1.0,
        note="predicted and measured share of the step: "
        + ", ".join(f"{devices} devices {predicted:.1%} and {measured:.1%}" for devices, predicted, measured in shares),
    )


def quality_lines(results: QualityResults) -> Iterator[Line]:
    """Yield the lines of a finished study of the quality of training."""
    gaps = [result.errors for result in results.gap if result.errors]
    if gaps:
        errors = {name: [error for each in gaps for error in each[name]] for name in gaps[0]}
        errors = {name: errors[name] for name in (_PREDICTED, "no gap", "linear interpolation in log b")}
        yield _quality_line("gap of batch norm at held-out batches", errors, 0.25, len(gaps))
    if drifts := [error for result in results.divergence for error in result.errors()]:
        rows = [error for result in results.divergence for error in result.errors("independent_rows")]
        errors = {_PREDICTED: drifts, "independent rows": rows}
        yield _quality_line("divergence of statistics at every batch norm", errors, 0.2, len(results.divergence))
    for outside, most in ((False, 0.1), (True, 0.2)):
        errors = {}
        for of_model in results.steps_to_target:
            chosen = {p.global_batch for p in of_model.points if p.held_out and p.outside == outside and p.median}
            for index, batch in enumerate(of_model.predicted.batches):
                for name, values in of_model.errors.items() if batch in chosen else ():
                    errors.setdefault(name, []).append(values[index])
        if errors:
            where = "one octave outside the fitted batches" if outside else "inside the fitted batches"
            yield _quality_line(f"steps to a target loss, {where}", errors, most, len(results.steps_to_target))


def _quality_line(quantity: str, errors: Mapping[str, Sequence[float]], most: float, studies: int) -> Line:
    """Return the line of the predicted ones of these errors, beside the best null among the others."""
    medians = {name: _median(values) for name, values in errors.items()}
    value = medians.pop(_PREDICTED)
    best = min(medians, key=lambda name: medians[name])
    return Line(
        where="quality",
        quantity=quantity,
        value=value,
        target=f"{most:.0%} or less, below the nulls",
        met=value <= most and value < medians[best],
        points=len(errors[_PREDICTED]),
        calibrations=studies,
        null=medians[best],
        note=f"worst {max(errors[_PREDICTED]):.1%}; best null: {best}",
    )


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))
