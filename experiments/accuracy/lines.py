"""The lines of the table of accuracy: one for each number that is promised, from a frame of all scored points."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from dpsim.codec import Noun
from dpsim.experiments import emulation, waiting
from dpsim.experiments.cases import Record
from dpsim.harness.sweep.coverage import by_other_studies, coverage_by_stratum, covered_points
from dpsim.harness.sweep.scores import shape_score, step_score
from dpsim.machine import NODE, Network
from dpsim.nn.tokens import norm_of
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison
from dpsim.records.coverage import CoveredPoint, StratumCoverage
from dpsim.records.quality import QualityResults

STEP = "median error of the step"
_MOST_IN_A_SWEEP = {"this machine": (0.015, 0.03), "emulated link": (0.015, 0.025), "shaped hosts": (0.02, 0.06)}
"""The most that a sweep's median error should be, with one device and with two, by network."""
_ENOUGH_SWEEPS, _MOST_UNDECIDED = 0.9, 1 / 3
_LEAST_SKILL, _LEAST_SHAPE_SKILL = 0.5, 0.6
_MOST_REGRET, _WORST_REGRET = 0.02, 0.05
_LEVEL, _EVERYWHERE = 0.9, "everywhere"
_PREDICTED = "predicted"
_OF_POINT = ("devices", "error", "beforehand_error", "noise", "emulated_compute")
_PANEL = ["sweep", "group"]
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


def stratum(point: ComparedPoint) -> str:
    """Return the network and devices of a point: ``emulated link, 8 devices, emulated computation``.

    Conditions of shaped hosts are places of their own.
    """
    network = "this machine" if point.network == NODE else "emulated link"
    if (of := Network.parse(point.network)).shaped:
        network = ", ".join(["shaped hosts", *(name for name, _ in of.conditions)])
    emulated = ", emulated computation" if point.emulated_compute else ""
    return f"{network}, {point.devices} device{'s' if point.devices > 1 else ''}{emulated}"


def frame(comparisons: Comparisons) -> pd.DataFrame:
    """Return a row for each scored point: its sweep, stratum and group, its errors, that of its group's best null.

    ``scores`` is what was derived of the group; None for one of a single point.
    """
    rows = []
    for name, comparison in comparisons.items():
        groups = {group.name: group for group in comparison.groups}
        for point in comparison.scored:
            row = {"sweep": name, "question": comparison.experiment.question, "stratum": stratum(point), "point": point}
            row |= {"group": point.group, "scores": groups.get(point.group)}
            rows.append(row | {column: getattr(point, column) for column in _OF_POINT})
    table = pd.DataFrame(rows, columns=["sweep", "question", "stratum", "point", "group", "scores", *_OF_POINT])
    table["error"], table["noise"] = table.error.abs(), table.noise.astype(float)
    table["null_error"] = table.groupby(_PANEL).point.transform(_null_errors)
    return table


def _null_errors(points: pd.Series) -> list[float]:
    """Return how far off the null is that is best in a group: NaN for points without nulls."""
    with_null = [point for point in points if point.null_step_s]
    best = step_score(with_null).null if with_null else ""
    return [abs(p.null_step_s[best] / p.measured_step_s - 1) if p.null_step_s else np.nan for p in points]


def lines(comparisons: Comparisons) -> Iterator[Line]:
    """Yield all lines that can be derived from the comparisons, by name."""
    table = frame(comparisons)
    coverages = {coverage.stratum: coverage for coverage in _coverages(comparisons)}
    for where, of_stratum in table[table.question.isin(["local-batch", "fusion-threshold"])].groupby("stratum"):
        yield from _stratum_lines(where, of_stratum)
        if where in coverages:
            yield from _interval_lines(coverages[where])
    computed = table[(table.question == "local-batch") & ~table.emulated_compute.astype(bool)]
    if len(computed):
        yield _step_line("local batch", computed, 0.03)
    yield from _condition_lines(table)
    yield from _norm_lines(table[table.question == "batch-norm"])
    if _EVERYWHERE in coverages:
        yield from _interval_lines(coverages[_EVERYWHERE])


def _line(table: pd.DataFrame, where: str, quantity: str, value: float | None, most: float = 0.0, **more: Any) -> Line:
    """Return a line about these points, whose value should be no more than ``most`` unless ``more`` says what else."""
    fields: dict[str, Any] = {
        "points": len(table),
        "calibrations": table.sweep.nunique(),
        "target": f"{most:.0%} or less",
    }
    if value is not None:
        fields["met"] = bool(value <= most)
    return Line(where=where, quantity=quantity, value=value, **(fields | more))


def _step_line(where: str, table: pd.DataFrame, most: float) -> Line:
    """Return the error of the step, against the null that is best in each group."""
    medians = table[["null_error", "noise"]].median()
    null, noise = (None if np.isnan(median) else float(median) for median in medians)
    note = f"made beforehand {table.beforehand_error.abs().median():.1%}"
    return _line(table, where, STEP, float(table.error.median()), most, null=null, noise=noise, note=note)


def _stratum_lines(where: str, table: pd.DataFrame) -> Iterator[Line]:
    line = functools.partial(_line, table, where)
    yield _step_line(where, table, 0.06)
    if not table.emulated_compute.iloc[0]:
        yield _sweeps_line(where, table)
    yield line("90th percentile", float(np.percentile(table.error, 90)), 0.06)
    scored = table[table.scores.notna()]
    groups = scored.drop_duplicates(_PANEL).scores
    several = groups[table.devices > 1]
    skills = [group.step.skill for group in several if not group.below_noise and group.step.skill is not None]
    if skills:
        share = float(np.mean([skill >= _LEAST_SKILL for skill in skills]))
        yield line(
            f"sweeps with a skill on step time of {_LEAST_SKILL} or more",
            share,
            target=f"{_ENOUGH_SWEEPS:.0%} or more, all above 0",
            met=share >= _ENOUGH_SWEEPS and min(skills) > 0,
            points=sum(group.points for group in several),
            calibrations=len(skills),
            note=f"median {_median(skills):.2f}, worst {min(skills):.2f}; {sum(skill > 0 for skill in skills)} of "
            f"{len(skills)} above 0",
        )
    yield _shape_line(where, table)
    if len(groups):
        regrets = [group.regret for group in groups]
        mean, worst = float(np.mean(regrets)), max(regrets)
        yield line(
            "mean regret of the predicted best",
            mean,
            target=f"{_MOST_REGRET:.0%} or less, worst {_WORST_REGRET:.0%}",
            met=mean <= _MOST_REGRET and worst <= _WORST_REGRET,
            points=len(scored),
            note=f"{len(regrets)} panels, worst {worst:.1%}",
        )


def _sweeps_line(where: str, table: pd.DataFrame) -> Line:
    """Return the share of sweeps whose own median error is small enough.

    A sweep in which two runs of one setting differ by more than that says nothing: it is undecided.
    """
    most = _MOST_IN_A_SWEEP[where.split(",")[0]][int(table.devices.iloc[0] > 1)]
    sweeps = table.groupby(_PANEL).agg(error=("error", "median"), noise=("noise", "max"))
    decided = sweeps[~(sweeps.noise > most)]
    undecided = len(sweeps) - len(decided)
    share = float((decided.error <= most).mean()) if len(decided) else None
    enough = undecided / len(sweeps) <= _MOST_UNDECIDED
    return _line(
        table,
        where,
        f"sweeps with a median error of {most:.1%} or less",
        share,
        target=f"{_ENOUGH_SWEEPS:.0%} or more",
        met=None if share is None else share >= _ENOUGH_SWEEPS and enough,
        calibrations=len(decided),
        note=f"{undecided} more sweeps are undecided: two runs of one setting differ by more; median of all sweeps "
        f"{sweeps.error.median():.1%}, worst {sweeps.error.max():.1%}",
    )


def _shape_line(where: str, table: pd.DataFrame) -> Line:
    """Return the skill on the shape of the panels whose effect exceeds three times the noise."""
    counts = [scores is not None and scores.shape_counts for scores in table.scores]
    panels = [
        [point for point in points if point.null_step_s]
        for _, points in table[counts].groupby(_PANEL, sort=False).point
    ]
    score = shape_score(panels)
    skill = None if score is None else score.skill
    return _line(
        table,
        where,
        "skill on the shape",
        skill,
        target=f"{_LEAST_SHAPE_SKILL} or more",
        met=None if skill is None else skill >= _LEAST_SHAPE_SKILL,
        points=sum(map(len, panels)),
        note="no panel has an effect above three times the noise"
        if score is None
        else f"{len(panels)} of {table.groupby(_PANEL).ngroups} panels; error {score.median_abs_error:.1%}, best null "
        f"{score.null} {score.null_median_abs_error:.1%}",
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


def _condition_lines(table: pd.DataFrame) -> Iterator[Line]:
    """Yield for each condition of shaped hosts how often the sign of its effect on the step was predicted.

    Effects below three times the noise of the two settings do not count.
    """
    if table.empty:
        return
    several = table[(table.devices > 1) & table.stratum.str.startswith("shaped hosts")]
    if several.empty:
        return
    plain = {(row.sweep, _apart(row.point)): row.point for row in several.itertuples() if "+" not in row.point.network}
    for where, members in several[several.point.map(lambda p: "+" in p.network).astype(bool)].groupby("stratum"):
        pairs = [
            (row.point, plain[key]) for row in members.itertuples() if (key := (row.sweep, _apart(row.point))) in plain
        ]
        effects = [
            (a.measured_step_s / b.measured_step_s - 1, a.predicted_step_s / b.predicted_step_s - 1) for a, b in pairs
        ]
        noises = [3 * max(a.noise or 0.0, b.noise or 0.0) for a, b in pairs]
        counted = [pair for pair, noise in zip(effects, noises, strict=True) if abs(pair[0]) > noise]
        right = sum(seen * told > 0 for seen, told in counted) / len(counted) if counted else None
        yield Line(
            where=where,
            quantity="sign of the condition's effect",
            value=right,
            target="100%",
            met=None if right is None else right == 1,
            points=len(counted),
            calibrations=members.sweep.nunique(),
            note=f"effect {_median([seen for seen, _ in effects]):+.0%}, predicted "
            f"{_median([told for _, told in effects]):+.0%} (medians)",
        )


def _apart(point: ComparedPoint) -> tuple[Any, ...]:
    """What a point has in common with the same setting under a condition."""
    return Network.parse(point.network).plain.token, point.devices, point.fusion_threshold_bytes, point.overlap


def _norm_lines(table: pd.DataFrame) -> Iterator[Line]:
    """Yield the step with each norm on several devices, and what global statistics add to it."""
    several = table[table.devices > 1]
    if not len(several):
        return
    yield _step_line("batch norm", several, 0.04)
    errors = []
    for _, points in table[table.scores.notna()].groupby(_PANEL).point:
        by_norm = {norm_of(point.model, point.batch_norm): point for point in points}
        if {"local", "global"} <= by_norm.keys():
            local, synchronised = by_norm["local"], by_norm["global"]
            predicted = synchronised.predicted_step_s / local.predicted_step_s
            errors.append(abs(predicted / (synchronised.measured_step_s / local.measured_step_s) - 1))
    if errors:
        quantity = "error of step with global over local"
        yield _line(table, "batch norm", quantity, _median(errors), 0.1, points=len(errors))


def emulation_line(record: Record[emulation.Case]) -> Line:
    """Return what emulated computation changes in a step of two ranks that replays the times of real ones."""
    changes = [emulation.change(each) for each in record.measured]
    return Line(
        where="emulated link, 2 devices",
        quantity="replayed step over real step",
        value=(value := _median(map(abs, changes))),
        target="3% or less",
        met=value <= 0.03,
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
