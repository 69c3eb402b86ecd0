"""The ``Comparison`` of a sweep, derived from its records and nothing else."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dpsim.fields import Decides, deciding
from dpsim.grouping import grouped
from dpsim.harness.sweep import scores
from dpsim.harness.sweep.coverage import coverage_by_stratum, covered_points
from dpsim.harness.sweep.pairing import joined
from dpsim.harness.sweep.questions import compared, group_name
from dpsim.machine import Machine
from dpsim.model import recommended
from dpsim.plan import Plan
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import ALL_NETWORKS, Comparison, Group, Overall
from dpsim.records.quality import QualityResults
from dpsim.records.reproduce import MeasuredDrift, PredictedDrift, ReproduceRecord, promised
from dpsim.records.sweep import Experiment, Predictions, Results, clean_values
from dpsim.report.sweep.question import QUESTIONS, Question
from dpsim.setting import Setting, beside_fsdp
from dpsim.study.statistics import median_interval


def compare(
    predictions: Predictions,
    results: Results,
    drift: ReproduceRecord | None = None,
    quality: QualityResults | None = None,
    blind: Predictions | None = None,
) -> Comparison:
    """Compare measured with predicted: flat points, and scores for each group, each network and overall.

    ``drift`` is the drift that a sweep over the number of devices measured (``dpsim.harness.sweep.drift``), ``quality``
    the quality of training that a sweep measured (``dpsim.harness.sweep.quality``). What is compared are the ``blind``
    predictions, from what was profiled and calibrated in turns with the samples; without them those made beforehand.
    Raises ``FileFormatError`` when the
    records are damaged or do not belong together (see ``pairing``).
    """
    measured, missing = joined(predictions, results, blind)
    experiment = results.experiment
    places = dict.fromkeys(point.setting.where for point in measured)
    chosen = {where: _chosen_overlap(where, measured, predictions) for where in places}
    points, groups = _grouped(measured, chosen, experiment)
    points = _with_related(points, results, drift)
    many = [p for p in points if p.scored and p.devices > 1]
    single = [p for p in points if p.scored and p.devices == 1]
    covered = functools.partial(covered_points, points, results.predictions_sha256)
    return Comparison(
        experiment=results.experiment,
        points=tuple(points),
        groups=tuple(groups),
        networks=_overall_scores(many, [group for group in groups if group.devices != 1]),
        single_device_median_abs_error=float(np.median([abs(p.error) for p in single])) if single else None,
        overlap=scores.overlap_effects(points),
        chosen_overlap=chosen,
        predictions_sha256=results.predictions_sha256,
        predicted_at=predictions.predicted_at,
        measured_from=results.measured_from,
        measured_until=results.measured_until,
        same_environment=predictions.environment == results.environment,
        not_measured=missing,
        harness_warnings=results.warnings,
        cores=results.environment.cores,
        identical=drift.kept_promises if drift is not None and experiment.value("leaves") else None,
        drift_predictions_sha256=drift.predictions_sha256 if drift is not None else "",
        relative_uncertainty=max((each.relative_uncertainty or 0.0 for each in predictions.machines), default=0.0),
        compute_slowdown_half_width=_slowdown_half_width(predictions.machines),
        compared=compared(experiment),
        quality=quality,
        intervals=coverage_by_stratum(covered()),
        interval=next(iter(coverage_by_stratum(covered(stratum=ALL_NETWORKS))), None),
        **({} if blind is None else _beforehand(many or single, blind)),
    )


def _overall_scores(points: Sequence[ComparedPoint], groups: Sequence[Group]) -> tuple[Overall, ...]:
    """Return the scores of each network, of points and groups of several devices."""
    return tuple(
        scores.overall(place[0], [p for p in points if _place(p) == place], [g for g in groups if _place(g) == place])
        for place in dict.fromkeys(map(_place, groups))
    )


def _slowdown_half_width(machines: Sequence[Machine]) -> float:
    """Return the largest half width of the slowdowns that were calibrated."""
    slowdowns = (each for machine in machines if machine.cores for each in machine.compute_slowdown)
    return max((each.half_width for each in slowdowns), default=0.0)


def with_groups(results: Results, predictions: Predictions, blind: Predictions | None) -> Results:
    """Return the results with which of their points are compared with each other, and with which guesses."""
    points = compare(predictions, results, blind=blind).points
    groups = grouped((point for point in points if point.scored), lambda point: (_place(point), point.group))
    settings = [{point.setting.first_run for point in members} for members in groups.values()]
    nulls_s = [point.null_step_s for point in points if point.scored and point.devices > 1]
    return msgspec.structs.replace(
        results,
        groups=tuple(
            tuple(number for number, run in enumerate(results.points) if run.setting.first_run in members)
            for members in settings
        ),
        guesses=tuple(
            name
            for name in (nulls_s[0] if nulls_s else ())
            if name != scores.HINDSIGHT and all(name in nulls for nulls in nulls_s)
        ),
    )


def _beforehand(points: Sequence[ComparedPoint], blind: Predictions) -> dict[str, Any]:
    """Return what a comparison tells of the predictions made before the first sample, beside the blind ones."""
    return {
        "blind_predicted_at": blind.predicted_at,
        "beforehand_median_abs_error": float(np.median([abs(p.beforehand_error) for p in points])),
        "machine_change": float(np.median([p.predicted_step_s / p.beforehand_step_s - 1 for p in points])),
    }


def _place(item: ComparedPoint | Group) -> tuple[str, bool, str]:
    """Return the network, whether computation is emulated on it, and who trains."""
    return item.network, item.emulated_compute, item.runtime


def _grouped(
    measured: Sequence[ComparedPoint], chosen: Mapping[str, str], experiment: Experiment
) -> tuple[list[ComparedPoint], list[Group]]:
    """Return the points of all groups with what compares them, and the scores of those groups that have nulls."""
    question = QUESTIONS.find(experiment.question)
    points: list[ComparedPoint] = []
    groups: list[Group] = []
    for name, members in grouped(measured, lambda point: group_name(experiment, point.setting)).items():
        noise = scores.aa_noise(members)
        of_group = [
            point.replaced(
                group=name,
                noise=noise,
                scored=point.devices == 1
                or not question.alternatives_apart
                or point.overlap == chosen[point.setting.where],
            )
            for point in members
        ]
        of_group = _with_nulls(of_group, question)
        points += of_group
        if any(p.null_step_s for p in of_group):
            groups.append(scores.group([p for p in of_group if p.scored]))
    return points, groups


def _chosen_overlap(where: str, points: Sequence[ComparedPoint], predictions: Predictions) -> str:
    """Return the overlap that the sweep chose for a network: the one that the predictions recommend.

    If that was not run, it is the overlap with the most points; among equals one that is not ``off``.
    """
    run = Counter(p.overlap for p in points if p.setting.where == where and p.devices > 1)
    mechanisms = predictions.mechanisms.get(where, {})
    if mechanisms:
        fastest = recommended(mechanisms)
        if fastest in run:
            return fastest
    return max(sorted(run), key=lambda name: (run[name], name != "off"), default="off")


def _with_nulls(points: Sequence[ComparedPoint], question: Question) -> list[ComparedPoint]:
    """Return the points of a group with the nulls of those that the question scores, and the best of them marked."""
    scored = [point for point in points if point.scored]
    answered = list(points)
    for number, point in enumerate(points):
        names = question.nulls if point.devices > 1 else question.single_nulls
        if point.scored and names:
            step, exposed = scores.nulls_of(scored, point, names)
            answered[number] = point.replaced(null_step_s=step, null_exposed_s=exposed)
    marks: tuple[tuple[str, Callable[[ComparedPoint], float]], ...] = (
        ("is_best_measured", lambda p: p.measured_s_per_sample),
        ("is_best_predicted", lambda p: p.predicted_step_s / p.global_batch),
    )
    if any(point.null_step_s for point in answered):
        for mark, time in marks:
            best = min((i for i, p in enumerate(answered) if p.scored), key=lambda i: time(answered[i]))
            answered[best] = answered[best].replaced(**{mark: True})
    return answered


def _with_related(
    points: Sequence[ComparedPoint], results: Results, drift: ReproduceRecord | None
) -> list[ComparedPoint]:
    """Return the points with their speedup, dpsim's own runtime and the drift of their training, where measured.

    The single device of a point has the same global batch, or under weak scaling the same local batch. One device needs
    no network: where it was not run under a point's network, its run under another one serves.
    """
    weak = results.experiment.weak
    single: dict[tuple[Any, ...], ComparedPoint] = {}
    for point in points:
        if point.devices == 1:
            single.setdefault((point.network, *_scaled_from(point, weak)), point)
            single.setdefault(_scaled_from(point, weak), point)
    return [
        point.replaced(
            alone=single.get((point.network, *_scaled_from(point, weak))) or single.get(_scaled_from(point, weak)),
            **_other_run(point.setting, results),
            **{} if drift is None else _trained(point.setting, drift),
        )
        for point in points
    ]


def _scaled_from(point: ComparedPoint, weak: bool) -> tuple[Any, ...]:
    """Return what a point and the single device have in common that its speedup is over."""
    setting = point.setting
    batch = point.local_batch if weak else float(point.global_batch)
    return setting.compute, setting.runtime, batch, setting.plan.accumulate, *setting.identity(Decides.COMPUTE_TIME)


def _other_run(setting: Setting, results: Results) -> dict[str, Any]:
    """Return the run of another runtime with the plan of a setting, or nothing where none was measured beside it."""
    wanted = beside_fsdp(setting).plan, setting.network
    runs = (run for run in results.other_points if run.step_s and (run.setting.plan, run.setting.network) == wanted)
    run = next(runs, None)
    return (
        {"other_run": run, "other_half_width": median_interval(clean_values([run])).relative_half_width} if run else {}
    )


def _trained(setting: Setting, record: ReproduceRecord) -> dict[str, Any]:
    """Return the outcome of a setting's training and its divergence, or nothing where it was not trained."""
    trains = (run for run in record.runs if _trains(record.reproduction.model, run.plan, setting))
    run = next(trains, None)
    if run is None:
        return {}
    plan, devices = run.plan, setting.plan.devices
    trajectory = record.trajectories[run.trajectory]
    if devices == 1:
        return {"trajectory": trajectory}
    measured, predicted = record.measured_drift(plan), record.predicted_drift(plan)
    if measured is None and promised(plan) and record.identical(run):
        measured = MeasuredDrift(plan=plan, parameters=0.0, loss=0.0)
    if predicted is None and promised(plan):
        predicted = PredictedDrift(batch_norm=plan.batch_norm, devices=devices, parameters=0.0)
    return {"trajectory": trajectory, "divergence": measured, "predicted_divergence": predicted}


def _trains(model: str, trained: Plan, setting: Setting) -> bool:
    """Return whether a model and plan train what a setting does; on one device its communication does not matter."""
    plan = setting.plan
    names = deciding(Decides.BITS | Decides.SHARES, Plan) if plan.devices == 1 else (*_COMPARED, "threshold_bytes")
    return model == setting.model and all(getattr(plan, name) == getattr(trained, name) for name in names)


_COMPARED = tuple(name for name in Plan.__struct_fields__ if name != "fusion_threshold_bytes")
"""The fields of a plan as they were given; a threshold may have been left out."""
