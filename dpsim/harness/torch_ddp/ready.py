"""When DDP's gradients became ready, beside when they were predicted to."""

from __future__ import annotations

import numpy as np

from dpsim.predict.step import price, scheduled
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
        expected_s = price(scheduled(workload, machine, plan), machine).buckets_ready_s()
        if len(expected_s) == len(run.bucket_ready_s):
            errors += (expected_s / np.array(run.bucket_ready_s) - 1).tolist()
    return errors
