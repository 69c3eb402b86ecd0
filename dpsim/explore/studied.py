"""The what-if page of a study: what it profiled and calibrated, with the points that it measured."""

from __future__ import annotations

import statistics
from pathlib import Path

from dpsim.errors import ConfigError
from dpsim.explore.page import page_of_plan, setting_of
from dpsim.records.sweep import clean_values, read_predictions, read_results


def studied(folder: Path) -> str:
    """Return the page of a finished sweep, which begins with its first setting on several devices.

    The layers and the machine are those of that setting's prediction, and the measured points those that were
    predicted from the same ones: medians over the samples of which the report's are. Raises ``ConfigError`` for
    another folder, and ``FileFormatError``.
    """
    blind = folder / "blind.json"
    known = blind if blind.is_file() else folder / "predictions.json"
    if not (known.is_file() and (folder / "results.json").is_file()):
        raise ConfigError(
            f"{folder} is no finished sweep: it has no predictions.json and results.json",
            allowed="the folder of a sweep that has measured, such as reports/example",
            remedy="name it, or give --workload and --machine",
        )
    predictions = read_predictions(known)
    first = next((each for each in predictions.points if each.setting.plan.devices > 1), predictions.points[0])
    alike = {
        each.setting
        for each in predictions.points
        if each.workload == first.workload and (each.machine == first.machine or each.setting.plan.devices == 1)
    }
    points = (point for point in read_results(folder / "results.json").points if point.setting in alike)
    measured = [
        setting_of(point.setting.plan) | {"step_s": statistics.median(clean_values([point]))} for point in points
    ]
    workload, machine = predictions.workloads[first.workload], predictions.machines[first.machine]
    return page_of_plan(workload, machine, first.setting.plan, measured=measured)
