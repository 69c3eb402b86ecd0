"""How a sweep was measured, as pairs of a name and a value."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from dpsim.network import Network
from dpsim.records.comparison import Comparison
from dpsim.records.sweep import Predictions, Results
from dpsim.report.content import Facts
from dpsim.report.sweep.checked import hashed
from dpsim.report.sweep.reliability import beforehand_sentence
from dpsim.report.sweep.tables import group_title
from dpsim.report.words import EMULATED_COMPUTE, field_name, interval_sentence, percent
from dpsim.units import format_bandwidth, format_size
from dpsim.workload import Workload

_BEFOREHAND = (
    "Every point was predicted, and the predictions were written and hashed, before the first sample was taken."
)
_SAME_MINUTES = (
    "These are the predictions made beforehand. The scored ones are others: they were made after the last sample, from "
    "profiles and calibrations that took turns with the samples, and from no sample."
)
_RULES = (
    "Configurations were interleaved in one run, in random order, after warm-up. The first two steps after each "
    "change of configuration and short last batches do not count; no other sample was dropped.",
    "Some configurations ran twice, the same against the same (A/A): the difference of the two medians is the noise.",
    "The model is scored against simple baselines (nulls); a model that does not beat the best of them has no skill.",
    "Networks marked (emulated) are paced links on this machine, never a real network, and are scored apart.",
)


def rules(comparison: Comparison) -> tuple[str, ...]:
    """Return by which rules a sweep was predicted, measured and scored."""
    predicted = (_BEFOREHAND, *([_SAME_MINUTES] if comparison.blind_predicted_at else ()))
    return " ".join(predicted), *_RULES


def run_facts(comparison: Comparison, predictions: Predictions, results: Results) -> Facts:
    """Return what was run, when, and what the predictions were made from. Facts that do not apply are left out."""
    run = results.experiment
    samples = [point.samples for point in comparison.points]
    noise = [
        f"{group_title(group)}: " + ("unknown" if group.noise is None else percent(group.noise))
        for group in comparison.groups
    ]
    calibrated = dict.fromkeys(point.calibrated_on for point in comparison.points if point.calibrated_on)
    workloads, emulated = predictions.workloads, any(point.emulated_compute for point in comparison.points)
    facts = (
        ("model and data", f"{_models(comparison)} on {run.dataset}, {_batch(comparison)}, seed {run.seed}"),
        ("batch norm", _batch_norm(comparison)),
        ("products in", _compute_dtypes(comparison)),
        ("fusion rule", _rules(comparison)),
        ("compared", ", ".join(field_name(name, comparison.points[0].runtime) for name in comparison.compared)),
        ("overlap", ", ".join(f"{network}: {overlap}" for network, overlap in comparison.chosen_overlap.items())),
        (
            "samples",
            f"{sum(samples)} steps over {len(samples)} configurations, {min(samples)} to {max(samples)} each",
        ),
        ("clean samples", _clean(comparison)),
        ("recording", _recording(results)),
        ("A/A noise", "; ".join(noise)),
        ("predicted intervals", _intervals(comparison)),
        ("parts", _parts(results)),
        ("predicted beforehand at", comparison.predicted_at),
        ("predicted from the same minutes at", _blind(comparison)),
        ("measured", f"{comparison.measured_from} to {comparison.measured_until}"),
        ("model", _model(results)),
        ("SHA-256 of the predictions made beforehand", comparison.predictions_sha256),
        ("SHA-256 of those of the same minutes", results.blind_sha256),
        ("SHA-256 of the inputs of both", results.inputs_sha256),
        ("what is hashed", f"{hashed(results.model_version)}."),
        ("SHA-256 of the predicted drift", comparison.drift_predictions_sha256),
        ("calibrated on", "; ".join(calibrated) or "not stated"),
        ("workload", "; ".join(_each(each.source or each.name for each in workloads)) + EMULATED_COMPUTE * emulated),
        ("emulated computation", _emulation(comparison, results)),
        ("links before they were shaped", _unshaped(predictions)),
        ("gradients", "; ".join(_each(_gradients(each) for each in workloads))),
    )
    return tuple((name, value) for name, value in facts if value)


def _clean(comparison: Comparison) -> str:
    """Return what share of the samples other processes left undisturbed; nothing for records that do not tell."""
    share = comparison.share_clean
    if share is None:
        return ""
    least = min(point.share_clean for point in comparison.points if point.share_clean is not None)
    return (
        f"{percent(share)} of the samples were clean (at least {percent(least)} of each configuration's); medians and "
        "intervals are of these"
    )


def _parts(results: Results) -> str:
    """Return what several jobs did apart; nothing where one job measured."""
    parts = "; ".join(f"{part.predictions_sha256[:12]}, measured from {part.measured_from}" for part in results.parts)
    return parts and (
        f"{len(results.parts)}, each in a job of its own, whose settings took turns, and whose predictions were hashed "
        f"before its first sample. SHA-256 of each: {parts}"
    )


def _blind(comparison: Comparison) -> str:
    """When the compared predictions were made from what took turns with the samples; nothing where none did."""
    if not comparison.blind_predicted_at:
        return ""
    return f"{comparison.blind_predicted_at}, without a measured sample. {beforehand_sentence(comparison)}"


def _model(results: Results) -> str:
    """Return which version of the model predicted."""
    return f"version {results.model_version}" if results.model_version else "from before versions were recorded"


def _unshaped(predictions: Predictions) -> str:
    """What the links of shaped hosts carried before they were shaped, and how many times the fastest rate that is."""
    of_networks = {machine.network: machine.unshaped_bytes_per_s for machine in predictions.machines}
    carried = max(of_networks.values(), default=0.0)
    if not carried:
        return ""
    fastest = max(max(Network.parse(token).rates_bytes_per_s()) for token, each in of_networks.items() if each)
    return f"each carried {format_bandwidth(carried)} in each direction, {carried / fastest:.2g} times the fastest rate"


def _emulation(comparison: Comparison, results: Results) -> str:
    """How well ranks that wait instead of computing kept their times."""
    points = [point for point in comparison.points if point.emulated_compute]
    late = max((point.deadline_lateness for point in points if point.deadline_lateness is not None), default=None)
    free = min((point.free_cores for point in points if point.free_cores is not None), default=None)
    if late is None or free is None:
        return ""
    repeated = sum(point.emulation.repeated_visits for point in results.points if point.emulation)
    again = f"; {repeated} visits were made again, because other programs made layers late" if repeated else ""
    return (
        f"{len(points)} of {len(comparison.points)} configurations: ranks waited for the profiled times instead of "
        f"computing; layers ended at most {percent(late)} of a step too late (median of a configuration), and the "
        f"cores were free for {percent(free)} of the time or more{again}"
    )


def _intervals(comparison: Comparison) -> str:
    """What share of the points lies in its predicted interval; one calibration is behind all of them."""
    all_points = comparison.interval
    assert all_points is not None
    inside = ", ".join(f"{part.stratum}: {percent(part.coverage)}" for part in comparison.intervals)
    return (
        f"{interval_sentence(comparison.interval_level, comparison.interval_studies)}. Here they hold "
        f"{percent(all_points.coverage)} of the {all_points.points} measured medians ({inside}), which share errors of "
        f"one calibration. Interval score {all_points.interval_score:.3g}, that of the best constant width (in "
        f"hindsight) {all_points.constant_score:.3g}, over the step"
    )


def _each(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _gradients(workload: Workload) -> str:
    return f"{len(workload.tensors)} tensors, {format_size(workload.gradient_bytes)}"


def _models(comparison: Comparison) -> str:
    return " and ".join(_each(point.model for point in comparison.points))


def _batch(comparison: Comparison) -> str:
    if comparison.experiment.weak:
        return f"local batch {', '.join(_each(f'{p.local_batch:g}' for p in comparison.points))} (weak scaling)"
    return f"global batch {', '.join(_each(str(p.global_batch) for p in comparison.points))}"


def _batch_norm(comparison: Comparison) -> str:
    if comparison.experiment.question == "fusion-threshold":
        return ""
    return "; ".join(
        _each(f"{p.batch_norm}, {f'{p.leaves} leaves' if p.leaves else 'plain sums'}" for p in comparison.points)
    )


def _compute_dtypes(comparison: Comparison) -> str:
    dtypes = _each(point.compute_dtype for point in comparison.points)
    return "" if dtypes == ["float32"] else " and ".join(dtypes)


def _rules(comparison: Comparison) -> str:
    rules = ", ".join(_each(point.fusion_rule for point in comparison.points))
    if comparison.experiment.question != "devices":
        return rules
    return f"{rules}, threshold {format_size(comparison.points[0].fusion_threshold_bytes)}"


def _recording(results: Results) -> str:
    """Return the largest share of a step that recording its timeline takes: events times the measured seconds each."""
    event_s = results.recording_s_per_event
    shares = [
        (point.events_per_step * event_s / statistics.median_high(point.step_s), point.events_per_step)
        for point in results.points
        if point.step_s and point.events_per_step
    ]
    if not event_s or not shares:
        return ""
    share, events = max(shares)
    return f"at most {share:.2%} of a step: {events} events of {event_s * 1e9:.0f} ns"
