"""A reproduction for programs: one flat record a run, and a summary."""

from __future__ import annotations

from typing import Any

from dpsim import codec
from dpsim.records.reproduce import ReproduceRecord, Run


def points_json(record: ReproduceRecord) -> list[dict[str, Any]]:
    """Every run: what it was, its digests, whether it is that of one device, where it differs first, its drift."""
    return [_point(record, run) for run in record.runs]


def _point(record: ReproduceRecord, run: Run) -> dict[str, Any]:
    one, trajectory = run.configuration, record.trajectories[run.trajectory]
    difference = record.difference(run)
    drift = next((drift for drift in record.drift if drift.configuration == one), None)
    points = record.predictions.points if record.predictions else ()
    predicted = next((p for p in points if (p.batch_norm, p.devices) == (one.batch_norm, one.devices)), None)
    return dict(codec.to_builtins(one)) | {
        "promised": one.promised,
        "digest": trajectory.digest,
        "losses_digest": trajectory.losses_digest,
        "final_loss": trajectory.losses[-1],
        "identical": record.identical(run),
        "first_difference": None if difference is None else codec.to_builtins(difference),
        "parameter_drift": drift.parameters if drift else None,
        "loss_drift": drift.loss if drift else None,
        "statistics_drift": drift.statistics if drift else None,
        "predicted_parameter_drift": predicted.parameters if predicted else None,
        "predicted_statistics_drift": predicted.statistics if predicted else None,
    }


def summary_json(record: ReproduceRecord) -> dict[str, Any]:
    """``identical``: everything that should be is, here and against the saved run; None where nothing is promised."""
    promised = [run for run in record.runs if run.configuration.promised]
    beside = record.against
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
        "against": None if beside is None else codec.to_builtins(beside),
    }
