"""How a sweep was measured, as pairs of a name and a value."""

from __future__ import annotations

import statistics

from dpsim.records.comparison import Comparison
from dpsim.records.sweep import Experiment, Predictions, Results
from dpsim.report.content import Facts
from dpsim.report.words import EMULATED_COMPUTE, devices_name, network_name, percent
from dpsim.units import format_size

RULES = (
    "Every point was predicted, and the predictions were written and hashed, before the first sample was taken.",
    "Configurations were interleaved in one run, in random order, after warm-up. The first two steps after each "
    "change of configuration and short last batches do not count; no other sample was dropped.",
    "Some configurations ran twice (A/A): the difference of the two medians is the noise.",
    "The model is scored against simple baselines (nulls); a model that does not beat the best of them has no skill.",
    "Networks marked (emulated) are paced links on this machine, never a real network, and are scored apart.",
)


def run_facts(comparison: Comparison, predictions: Predictions, results: Results) -> Facts:
    """Return what was run, when, and what the predictions were made from. Facts that do not apply are left out."""
    run = results.experiment
    samples = [point.samples for point in comparison.points]
    noise = [
        f"{network_name(group)}{f', {devices_name(group.devices)}' if group.devices else ''}: "
        + ("unknown" if group.noise is None else percent(group.noise))
        for group in comparison.groups
    ]
    calibrated = dict.fromkeys(point.calibrated_on for point in comparison.points if point.calibrated_on)
    workload = predictions.workload
    batch = f"local batch {run.global_batch} (weak scaling)" if run.weak else f"global batch {run.global_batch}"
    facts = (
        ("model and data", f"{run.model} on {run.dataset}, {batch}, seed {run.seed}"),
        ("batch norm", _batch_norm(run)),
        ("fusion rule", run.fusion_rule + _threshold(run)),
        ("overlap", ", ".join(f"{network}: {overlap}" for network, overlap in comparison.chosen_overlap.items())),
        (
            "samples",
            f"{sum(samples)} steps over {len(samples)} configurations, {min(samples)} to {max(samples)} each",
        ),
        ("recording", _recording(results)),
        ("A/A noise", "; ".join(noise)),
        ("predicted at", comparison.predicted_at),
        ("measured", f"{comparison.measured_from} to {comparison.measured_until}"),
        ("predictions' SHA-256", comparison.predictions_sha256),
        ("SHA-256 of the predicted drift", comparison.drift_predictions_sha256),
        ("calibrated on", "; ".join(calibrated) or "not stated"),
        ("workload", (workload.source or workload.name) + EMULATED_COMPUTE * workload.emulated_compute),
        ("gradients", f"{len(workload.tensors)} tensors, {format_size(workload.gradient_bytes)}"),
    )
    return tuple((name, value) for name, value in facts if value)


def _batch_norm(run: Experiment) -> str:
    if (scaling := run.scaling) is None:
        return ""
    return f"{scaling.batch_norm}, {scaling.leaves} leaves" if scaling.leaves else f"{scaling.batch_norm}, plain sums"


def _threshold(run: Experiment) -> str:
    return "" if run.scaling is None else f", threshold {format_size(run.fusion_thresholds_bytes[0])}"


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
