"""A reproduction for programs: one flat record for each run, and a summary."""

from __future__ import annotations

from typing import Any

from dpsim.codec import to_builtins
from dpsim.records.reproduce import ReproduceRecord, Run


def points_json(record: ReproduceRecord) -> list[dict[str, Any]]:
    """Return every run: its configuration and digests, where it first differs from one device, and its drift."""
    return [_point(record, run) for run in record.runs]


def _point(record: ReproduceRecord, run: Run) -> dict[str, Any]:
    trajectory, difference = record.trajectories[run.trajectory], record.difference(run)
    drift = record.measured_drift(run.configuration)
    predicted = record.predicted_drift(run.configuration)
    return dict(to_builtins(run.configuration)) | {
        "promised": run.configuration.promised,
        "digest": trajectory.digest,
        "losses_digest": trajectory.losses_digest,
        "final_loss": trajectory.losses[-1],
        "identical": record.identical(run),
        "first_difference": None if difference is None else to_builtins(difference),
        "parameter_drift": drift.parameters if drift else None,
        "loss_drift": drift.loss if drift else None,
        "statistics_drift": drift.statistics if drift else None,
        "predicted_parameter_drift": predicted.parameters if predicted else None,
        "predicted_statistics_drift": predicted.statistics if predicted else None,
    }


def summary_json(record: ReproduceRecord) -> dict[str, Any]:
    """Return the summary; ``identical`` says whether all promises were kept (``None``: nothing was promised)."""
    promised = any(run.configuration.promised for run in record.runs)
    saved = record.saved_comparison
    return {
        "identical": record.kept_promises if promised else None,
        "runs": len(record.runs),
        "different_results": len(record.trajectories),
        "digests": {
            run.configuration.batch_norm: record.trajectories[run.trajectory].digest
            for run in record.runs
            if run.configuration.devices == 1
        },
        "predictions_sha256": record.predictions_sha256,
        "against": None if saved is None else to_builtins(saved),
    }
