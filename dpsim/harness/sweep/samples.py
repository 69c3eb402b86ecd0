"""What passes between a sweep and the ranks that measure it: the task, and the samples saved after every round."""

from __future__ import annotations

from dpsim.codec import Noun
from dpsim.machine import Machine
from dpsim.plan import Plan
from dpsim.records.sweep import Experiment, MeasuredPoint, PointKey
from dpsim.workload import Workload

SAMPLES_SCHEMA = "dpsim.samples/1"


class MeasureTask(Noun, frozen=True):
    """What the ranks are told: the points in a fixed order, how to build them, and where to save what they find."""

    experiment: Experiment
    keys: tuple[PointKey, ...]
    plans: tuple[Plan, ...]
    workload: Workload
    machines: dict[str, Machine]
    already: tuple[MeasuredPoint, ...]
    spent_s: float
    predictions_sha256: str
    measured_from: str
    save_to: str


class Samples(Noun, frozen=True):
    """What has been measured so far; replaced as a whole after every round."""

    points: tuple[MeasuredPoint, ...]
    spent_s: float
    measured_from: str
    experiment: Experiment
    predictions_sha256: str
    recording_s_per_event: float
    schema: str = SAMPLES_SCHEMA
