"""What a compared point takes from other measurements: its speedup, dpsim's own runtime, the drift of its training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpsim.fields import Decides, deciding
from dpsim.plan import Plan
from dpsim.records.comparison import ComparedPoint
from dpsim.records.reproduce import MeasuredDrift, PredictedDrift, ReproduceRecord, promised
from dpsim.records.sweep import MeasuredPoint, Results
from dpsim.setting import Setting


def with_related(
    points: Sequence[ComparedPoint], results: Results, drift: ReproduceRecord | None
) -> list[ComparedPoint]:
    """Return the points with each of these, wherever it was measured.

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
            own_run=_own_run(point.setting, results),
            **{} if drift is None else _trained(point.setting, drift),
        )
        for point in points
    ]


def _scaled_from(point: ComparedPoint, weak: bool) -> tuple[Any, ...]:
    """Return what a point and the single device have in common that its speedup is over."""
    setting = point.setting
    batch = point.local_batch if weak else float(point.global_batch)
    return setting.compute, setting.runtime, batch, setting.plan.accumulate, *setting.identity(Decides.COMPUTE_TIME)


def _own_run(setting: Setting, results: Results) -> MeasuredPoint | None:
    """Return the run of dpsim's own runtime with the plan of a setting, where that was measured beside it."""
    wanted = setting.plan, setting.network
    runs = (run for run in results.other_points if run.step_s and (run.setting.plan, run.setting.network) == wanted)
    return next(runs, None)


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
