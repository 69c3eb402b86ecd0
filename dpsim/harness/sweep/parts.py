"""The parts of a sweep that can be measured apart, each in a job of its own, and their records joined into one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import msgspec

from dpsim.grouping import grouped
from dpsim.harness.sweep.questions import group_name
from dpsim.machine import Machine
from dpsim.records.sweep import Experiment, PredictedPoint, Predictions
from dpsim.setting import Setting
from dpsim.study.inputs import Inputs, Kinds, kinds_of
from dpsim.workload import Workload

_NUMBER = re.compile(r" \(\d+\)$")
"""How the second kind of settings with one name is numbered (``Prepared.name``)."""


def parts_of(experiment: Experiment) -> tuple[Experiment, ...]:
    """Return the parts of a sweep: each is the same experiment with some of its settings, as cases.

    Settings are in one part where they are compared with each other, or where they are predicted from one profile and
    one calibration, as those of several devices and the one device over which their speedup is taken are. So what a
    report sets side by side was measured in turns, in one job. Each part gets the budget's share for its settings, and
    trains nothing but them.
    """
    settings = experiment.settings
    members = _connected(settings, (lambda each: group_name(experiment, each), kinds_of))
    rows, spent = experiment.rows, experiment.budget_s / len(settings)
    return tuple(
        msgspec.structs.replace(
            experiment,
            base={},
            axes={},
            cases=tuple(rows[index] for index in of_part),
            budget_s=spent * len(of_part),
            steps=0,
            seeds=0,
            target_loss=0.0,
        )
        for of_part in members
    )


def _connected(settings: Sequence[Setting], keys: Sequence[Callable[[Setting], Hashable]]) -> list[list[int]]:
    """Return the indices of the settings of each part: two of them share a part if they share any key."""
    part = [*range(len(settings))]
    for key in keys:
        keyed = [key(setting) for setting in settings]
        for together in grouped(range(len(settings)), keyed.__getitem__).values():
            joined = {part[index] for index in together}
            if len(joined) > 1:
                part = [min(joined) if each in joined else each for each in part]
    return [*grouped(range(len(settings)), part.__getitem__).values()]


def split(predictions: Predictions) -> list[Predictions]:
    """Return the predictions of each part of a sweep; their workloads and machines are those of all parts."""
    of_kind: dict[Kinds, int] = {}
    parts = parts_of(predictions.experiment)
    for number, part in enumerate(parts):
        of_kind |= {kinds_of(setting): number for setting in part.settings}
    points = grouped(predictions.points, lambda point: of_kind[kinds_of(point.setting)])
    return [
        msgspec.structs.replace(predictions, experiment=part, points=tuple(points[number]))
        for number, part in enumerate(parts)
    ]


def joined_predictions(experiment: Experiment, parts: Sequence[Predictions]) -> Predictions:
    """Return the predictions of a sweep: those of its parts, with the workloads and machines of all.

    They are as old as the oldest.
    """
    workloads, machines, points = list[Workload](), list[Machine](), list[PredictedPoint]()
    mechanisms, names = dict[str, dict[str, float]](), Counter[str]()
    for part in parts:
        points += [
            msgspec.structs.replace(
                point, workload=point.workload + len(workloads), machine=point.machine + len(machines)
            )
            for point in part.points
        ]
        workloads += part.workloads
        machines += part.machines
        for name, steps in part.mechanisms.items():
            where = _NUMBER.sub("", name)
            names[where] += 1
            mechanisms[where if names[where] == 1 else f"{where} ({names[where]})"] = steps
    return msgspec.structs.replace(
        parts[0],
        experiment=experiment,
        predicted_at=min(part.predicted_at for part in parts),
        workloads=tuple(workloads),
        machines=tuple(machines),
        points=tuple(points),
        mechanisms=mechanisms,
    )


def joined_inputs(parts: Sequence[Inputs]) -> Inputs:
    """Return what the predictions of a sweep follow from: for each part, what was profiled and calibrated with it."""
    first = parts[0]
    return Inputs(
        profiles=(),
        bare=(),
        calibrations=(),
        selections=(),
        rows=(),
        environment=first.environment,
        measured_until=max(part.measured_until for part in parts),
        widths=first.widths,
        beforehand_until=min(part.beforehand_until for part in parts),
        model_version=first.model_version,
        parts=tuple(parts),
    )
