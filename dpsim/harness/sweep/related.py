"""What a compared point takes from other measurements: its speedup, dpsim's own runtime, the drift of its training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from dpsim.fields import Decides, deciding
from dpsim.plan import Plan
from dpsim.records.comparison import ComparedPoint
from dpsim.records.reproduce import Configuration, ReproduceRecord, Reproduction
from dpsim.records.sweep import Results
from dpsim.setting import Setting


def with_related(
    points: Sequence[ComparedPoint], results: Results, drift: ReproduceRecord | None
) -> list[ComparedPoint]:
    """Return the points with each of these, wherever it was measured."""
    related = _with_speedup(points, weak=results.experiment.weak)
    related = [_with_own_runtime(point, results) for point in related]
    return related if drift is None else [_with_drift(point, drift) for point in related]


def _with_speedup(points: Sequence[ComparedPoint], *, weak: bool) -> list[ComparedPoint]:
    """Return the points with their speedup: samples/s over those of one device.

    Both have the same global batch, or under weak scaling the same local batch. One device needs no network: where it
    was not run under a point's network, its run under another one serves.
    """
    single: dict[tuple[Any, ...], ComparedPoint] = {}
    for point in points:
        if point.devices == 1:
            single.setdefault((point.network, *_trained(point, weak)), point)
            single.setdefault(_trained(point, weak), point)
    with_speedup = []
    for point in points:
        training = _trained(point, weak)
        alone = single.get((point.network, *training)) or single.get(training)
        if alone is not None:
            speedup = alone.measured_s_per_sample / point.measured_s_per_sample
            batches = point.global_batch / alone.global_batch
            point = msgspec.structs.replace(
                point,
                measured_speedup=speedup,
                predicted_speedup=batches * alone.predicted_step_s / point.predicted_step_s,
                efficiency=speedup / point.devices,
            )
        with_speedup.append(point)
    return with_speedup


def _trained(point: ComparedPoint, weak: bool) -> tuple[Any, ...]:
    """Return what a point and the single device have in common that its speedup is over."""
    setting = point.setting
    batch = point.local_batch if weak else float(point.global_batch)
    return setting.compute, setting.runtime, batch, setting.plan.accumulate, *setting.identity(Decides.COMPUTE_TIME)


def _with_own_runtime(point: ComparedPoint, results: Results) -> ComparedPoint:
    """Return the point with what dpsim's own runtime took for its plan, where that was measured beside it."""
    setting = point.setting
    for run in results.other_points:
        if run.step_s and (run.setting.plan, run.setting.network) == (setting.plan, setting.network):
            return msgspec.structs.replace(
                point,
                dpsim_step_s=float(np.median(run.step_s)),
                dpsim_exposed_communication_s=float(np.median(run.exposed_communication_s)),
            )
    return point


def _with_drift(point: ComparedPoint, record: ReproduceRecord) -> ComparedPoint:
    """Return the point with the drift of its training, or as it is where its configuration was not trained."""
    trains = (run for run in record.runs if _trains(record.reproduction, run.configuration, point.setting))
    run = next(trains, None)
    if run is None:
        return point
    configuration = run.configuration
    digest = record.trajectories[run.trajectory].digest
    if point.devices == 1:
        return msgspec.structs.replace(point, digest=digest)
    measured, predicted = record.measured_drift(configuration), record.predicted_drift(configuration)
    same = 0.0 if configuration.promised and record.identical(run) else None
    return msgspec.structs.replace(
        point,
        digest=digest,
        measured_drift=measured.parameters if measured is not None else same,
        measured_statistics_drift=measured.statistics if measured is not None else None,
        predicted_drift=predicted.parameters if predicted is not None else 0.0 if configuration.promised else None,
        predicted_statistics_drift=predicted.statistics if predicted is not None else None,
    )


def _trains(reproduction: Reproduction, configuration: Configuration, setting: Setting) -> bool:
    """Return whether a configuration trains what a setting does; on one device its communication does not matter."""
    plan, trained = setting.plan, reproduction.plan(configuration)
    names = deciding(Decides.BITS | Decides.SHARES, Plan) if plan.devices == 1 else (*_COMPARED, "threshold_bytes")
    return reproduction.model == setting.model and all(getattr(plan, name) == getattr(trained, name) for name in names)


_COMPARED = tuple(name for name in Plan.__struct_fields__ if name != "fusion_threshold_bytes")
"""The fields of a plan as they were given; a threshold may have been left out."""
