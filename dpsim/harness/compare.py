"""A sweep's ``Comparison``, derived from its two records and from nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from dpsim.errors import FileFormatError
from dpsim.harness import scores
from dpsim.harness.pairing import Pair, pair
from dpsim.harness.statistics import median_interval
from dpsim.machine import NODE
from dpsim.predict import recommended
from dpsim.record import Predictions, Results
from dpsim.report.comparison import ALL_NETWORKS, ComparedPoint, Comparison, Group, points_json, summary_json
from dpsim.report.warning import ReportWarning, warnings
from dpsim.units import format_size

__all__ = ["Comparison", "ReportWarning", "compare", "points_json", "summary_json", "warnings"]

SLOW = 1.5
GroupKey = tuple[str, int]


def compare(predictions: Predictions, results: Results) -> Comparison:
    """The measured and the predicted side by side: flat points, scores a group, a network and overall.

    Raises ``FileFormatError`` when the records are damaged or do not belong together (see ``pairing``).
    """
    pairs, missing = pair(predictions, results)
    if not pairs:
        raise FileFormatError("the results hold no point", allowed="1 or more", remedy="run the sweep again")
    chosen = {network: _chosen_overlap(network, pairs, predictions) for network in {p.key.network for p in pairs}}
    members: dict[GroupKey, list[Pair]] = {}
    for item in pairs:
        members.setdefault((item.key.network, item.key.devices), []).append(item)
    points: list[ComparedPoint] = []
    groups: list[Group] = []
    for (network, devices), everyone in members.items():
        scored = [p for p in everyone if devices == 1 or p.key.overlap == chosen[network]]
        noise = scores.aa_noise(everyone)
        found = _points(everyone, scored, noise, predictions)
        points += found
        if devices > 1 and scored:
            groups.append(scores.group([p for p in found if p.scored], scored, noise))
    points = _with_speedup(points)
    many = [p for p in points if p.scored and p.devices > 1]
    single = [p for p in points if p.scored and p.devices == 1]
    return Comparison(
        name=results.experiment.name, question=_question(results), points=tuple(points), groups=tuple(groups),
        networks=tuple(
            scores.overall(n, [p for p in many if p.network == n], [g for g in groups if g.network == n])
            for n in dict.fromkeys(g.network for g in groups)
        ),
        overall=scores.overall(ALL_NETWORKS, many, groups) if groups else None,
        single_device_median_abs_error=float(np.median([abs(p.error) for p in single])) if single else None,
        overlap=scores.overlap_effects(points), chosen_overlap=chosen,
        predictions_sha256=results.predictions_sha256, predicted_at=predictions.predicted_at,
        measured_from=results.measured_from, measured_until=results.measured_until,
        same_environment=predictions.environment == results.environment, not_measured=missing,
        harness_warnings=results.warnings,
    )  # fmt: skip


def _question(results: Results) -> str:
    run = results.experiment
    sizes = run.fusion_thresholds_bytes or tuple(sorted({p.key.fusion_threshold_bytes for p in results.points}))
    span = f" from {format_size(min(sizes))} to {format_size(max(sizes))} bytes".replace("inf bytes", "inf")
    return (
        f"Which fusion threshold{span} makes a training step of {run.model} on {run.dataset} "
        f"fastest at a global batch of {run.global_batch}, and does the model know it before anything is measured?"
    )


def _chosen_overlap(network: str, pairs: Sequence[Pair], predictions: Predictions) -> str:
    """The overlap that the sweep chose for a network: the one recommended by the predictions.

    Where that one was not run, the one with the most points; among equals one that is not ``off``.
    """
    run = Counter(p.key.overlap for p in pairs if p.key.network == network and p.key.devices > 1)
    mechanisms = predictions.mechanisms.get(network, {})
    if mechanisms:
        fastest = recommended(mechanisms)
        if fastest in run:
            return fastest
    return max(sorted(run), key=lambda name: (run[name], name != "off"), default="off")


def _points(
    everyone: Sequence[Pair], scored: Sequence[Pair], noise: float | None, predictions: Predictions
) -> list[ComparedPoint]:
    """The points of one network and device count, best ones marked among the scored."""
    points = [_point(item, item in scored, noise, predictions) for item in everyone]
    several = everyone[0].key.devices > 1
    for number, item in enumerate(everyone):
        if several and points[number].scored:
            step, exposed = scores.nulls_of(scored, item)
            points[number] = msgspec.structs.replace(points[number], null_step_s=step, null_exposed_s=exposed)
    marks: tuple[tuple[str, Callable[[ComparedPoint], float]], ...] = (
        ("is_best_measured", lambda p: p.measured_step_s),
        ("is_best_predicted", lambda p: p.predicted_step_s),
    )
    if several and scored:
        for mark, time in marks:
            best = min((i for i, p in enumerate(points) if p.scored), key=lambda i: time(points[i]))
            points[best] = msgspec.structs.replace(points[best], **{mark: True})
    return points


def _point(item: Pair, scored: bool, noise: float | None, predictions: Predictions) -> ComparedPoint:
    key, predicted, samples = item.key, item.predicted, item.samples()
    step = median_interval(samples)
    machines = [m for m in predictions.machines if m.network == key.network]
    emulated = key.network != NODE or any(m.emulated_network for m in machines)
    return ComparedPoint(
        devices=key.devices, layout=key.layout or str(key.devices), global_batch=key.global_batch,
        local_batch=key.global_batch / key.devices, fusion_rule=key.fusion_rule,
        fusion_threshold_bytes=key.fusion_threshold_bytes, buckets=item.runs[0].buckets, network=key.network,
        emulated_compute=predictions.workload.emulated_compute, emulated_network=emulated,
        measured_step_s=step.median, measured_low_s=step.low, measured_high_s=step.high,
        predicted_step_s=predicted.step_s, predicted_low_s=predicted.low_s, predicted_high_s=predicted.high_s,
        exposed_communication_s=float(np.median(item.exposed())),
        predicted_exposed_communication_s=predicted.exposed_communication_s,
        error=predicted.step_s / step.median - 1, noise=noise,
        calibrated_on="; ".join(dict.fromkeys(m.calibrated_on for m in machines if m.calibrated_on)),
        extrapolated=predicted.extrapolated, algorithm=key.algorithm, overlap=key.overlap, samples=len(samples),
        repeat=len(item.runs), measured_speedup=None, predicted_speedup=None, efficiency=None,
        is_best_measured=False, is_best_predicted=False, scored=scored, predicted_buckets=predicted.buckets,
        slow_samples=float(np.mean(np.array(samples) > SLOW * step.median)),
        null_step_s={}, null_exposed_s={},
    )  # fmt: skip


def _with_speedup(points: Sequence[ComparedPoint]) -> list[ComparedPoint]:
    """Points with samples/s over samples/s on 1 device at the same global batch (strong scaling).

    One device needs no network: where it was not run under a point's network, its run under another serves.
    """
    single: dict[tuple[str | None, int], ComparedPoint] = {}
    for point in points:
        if point.devices == 1:
            single.setdefault((point.network, point.global_batch), point)
            single.setdefault((None, point.global_batch), point)
    found = []
    for point in points:
        one = single.get((point.network, point.global_batch)) or single.get((None, point.global_batch))
        if one is not None:
            speedup = one.measured_step_s / point.measured_step_s
            point = msgspec.structs.replace(
                point,
                measured_speedup=speedup,
                predicted_speedup=one.predicted_step_s / point.predicted_step_s,
                efficiency=speedup / point.devices,
            )
        found.append(point)
    return found
