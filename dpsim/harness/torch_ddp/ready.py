"""When DDP's gradients became ready, beside when they were predicted to."""

from __future__ import annotations

import numpy as np

from dpsim.lowering import lower
from dpsim.lowering.computation import ready_times
from dpsim.predict.cost import compute_slowdown
from dpsim.predict.prices import local_share
from dpsim.records.sweep import Predictions, Results


def ready_errors(predictions: Predictions, results: Results) -> list[float]:
    """predicted / measured - 1 of the moment when each bucket was complete, from the start of backward.

    For every bucket of every setting of which it was measured.
    """
    predicted = {point.setting: point for point in predictions.points}
    errors: list[float] = []
    for run in results.points:
        point, plan = predicted[run.setting], run.setting.plan
        workload, machine = predictions.workloads[point.workload], predictions.machines[point.machine]
        ends = lower(workload, plan).bucket_start[1:] - 1
        if len(ends) != len(run.bucket_ready_s):
            continue
        slowdown, _ = compute_slowdown(machine, plan.devices, plan.layout)
        expected_s = ready_times(workload, local_share(plan))[ends] * slowdown
        errors += (expected_s / np.array(run.bucket_ready_s) - 1).tolist()
    return errors
