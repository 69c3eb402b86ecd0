"""The what-if page of a study: what it profiled and calibrated, with the points that it measured."""

from __future__ import annotations

import statistics

from dpsim.explore.page import page_of_plan, setting_of
from dpsim.records.comparison import SweepData
from dpsim.records.sweep import clean_values


def studied(swept: SweepData) -> str:
    """Return the page of a finished sweep, which begins with its first setting on several devices.

    The layers and the machine are those of that setting's prediction, and the measured points those that were
    predicted from the same ones: medians over the samples of which the report's are. Raises ``ConfigError`` for
    what a page cannot hold.
    """
    predictions = swept.scored
    first = next((each for each in predictions.points if each.setting.plan.devices > 1), predictions.points[0])
    alike = {
        each.setting
        for each in predictions.points
        if each.workload == first.workload and (each.machine == first.machine or each.setting.plan.devices == 1)
    }
    points = (point for point in swept.results.points if point.setting in alike)
    measured = [
        setting_of(point.setting.plan) | {"step_s": statistics.median(clean_values([point]))} for point in points
    ]
    workload, machine = predictions.workloads[first.workload], predictions.machines[first.machine]
    return page_of_plan(workload, machine, first.setting.plan, measured=measured)
