"""How a sweep was measured, as pairs of a name and a value, for the page and the Markdown."""

from __future__ import annotations

from dpsim.records.comparison import Comparison
from dpsim.records.sweep import Environment, Experiment, Predictions, Results
from dpsim.report.words import group_name, percent
from dpsim.units import format_size

Facts = tuple[tuple[str, str], ...]

RULES = (
    "Every point was predicted, and the predictions written and hashed, before the first sample was taken.",
    "Configurations were interleaved in one run, in random order, after warm-up. The first two steps after each "
    "change of configuration and short last batches do not count; no other sample was dropped.",
    "Some configurations ran twice (A/A): the difference of the twins' medians is the noise.",
    "The model is scored against nulls; one that does not beat the best of them has no skill.",
    "Networks marked (emulated) are paced links on this machine, never a real network, and are scored apart.",
)


def run_facts(comparison: Comparison, predictions: Predictions, results: Results) -> Facts:
    """What was run, when, and what the model knew."""
    run = results.experiment
    samples = [p.samples for p in comparison.points]
    noise = [f"{group_name(g)}: " + ("unknown" if g.noise is None else percent(g.noise)) for g in comparison.groups]
    calibrated = dict.fromkeys(p.calibrated_on for p in comparison.points if p.calibrated_on)
    steps = f"{sum(samples)} steps over {len(samples)} configurations, {min(samples)} to {max(samples)} each"
    return tuple(
        (name, value)
        for name, value in (
            ("model and data", f"{run.model} on {run.dataset}, {_batch(run)}, seed {run.seed}"),
            ("batch norm", _batch_norm(run)),
            ("fusion rule", run.fusion_rule + _threshold(run)),
            ("overlap", ", ".join(f"{network}: {word}" for network, word in comparison.chosen_overlap.items())),
            ("samples", steps),
            ("recording", _recording(results)),
            ("A/A noise", "; ".join(noise)),
            ("predicted at", comparison.predicted_at),
            ("measured", f"{comparison.measured_from} to {comparison.measured_until}"),
            ("predictions' SHA-256", comparison.predictions_sha256),
            ("predictions of drift", comparison.drift_predictions_sha256),
            ("calibrated on", "; ".join(calibrated) or "not said"),
            (
                "workload",
                f"{predictions.workload.source or predictions.workload.name}"
                + (" (emulated computation)" if predictions.workload.emulated_compute else ""),
            ),
            (
                "gradients",
                f"{len(predictions.workload.tensors)} tensors, " + format_size(predictions.workload.gradient_bytes),
            ),
        )
        if value
    )


def _batch(run: Experiment) -> str:
    return f"local batch {run.global_batch} (weak scaling)" if run.weak else f"global batch {run.global_batch}"


def _batch_norm(run: Experiment) -> str:
    if (over := run.scaling) is None:
        return ""
    return f"{over.batch_norm}, {over.leaves} leaves" if over.leaves else f"{over.batch_norm}, plain sums"


def _threshold(run: Experiment) -> str:
    return "" if run.scaling is None else f", threshold {format_size(run.fusion_thresholds_bytes[0])}"


def _recording(results: Results) -> str:
    """What recording the timelines cost: events a step times the measured seconds an event, at the worst."""
    event_s = results.recording_s_per_event
    shares = [
        (p.events_per_step * event_s / sorted(p.step_s)[len(p.step_s) // 2], p.events_per_step)
        for p in results.points
        if p.step_s and p.events_per_step
    ]
    if not event_s or not shares:
        return ""
    share, events = max(shares)
    return f"at most {share:.2%} of a step: {events} events of {event_s * 1e9:.0f} ns"


def environment_facts(environment: Environment) -> Facts:
    """The machine and the software of the measurement."""
    fixed = (
        ("processor", f"{environment.processor}, {environment.cores} cores, {format_size(environment.memory_bytes)}"),
        ("platform", environment.platform),
        (
            "software",
            f"dpsim {environment.dpsim}, Python {environment.python}, NumPy {environment.numpy}, "
            f"numba {environment.numba}",
        ),
        ("MPI", environment.mpi),
        ("BLAS", environment.blas),
    )
    return (*fixed, *sorted(environment.variables.items()))
