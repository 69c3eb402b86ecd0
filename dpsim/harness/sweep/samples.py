"""The task of the ranks that measure a sweep, and the samples that they save after every round."""

from __future__ import annotations

from dpsim.codec import Noun
from dpsim.machine import Machine
from dpsim.records.sweep import Experiment, MeasuredPoint
from dpsim.setting import Setting
from dpsim.workload import Workload

SAMPLES_SCHEMA = "dpsim.samples/2"


class MeasureTask(Noun, frozen=True):
    """The settings to measure, in a fixed order, what was measured before, and where to save the samples.

    ``places`` are those of each setting's workload and machine.
    """

    experiment: Experiment
    settings: tuple[Setting, ...]
    places: tuple[tuple[int, int], ...]
    workloads: tuple[Workload, ...]
    machines: tuple[Machine, ...]
    already: tuple[MeasuredPoint, ...]
    spent_s: float
    predictions_sha256: str
    measured_from: str
    save_to: str


class Samples(Noun, frozen=True):
    """The samples so far; the file is replaced as a whole after every round."""

    points: tuple[MeasuredPoint, ...]
    spent_s: float
    measured_from: str
    experiment: Experiment
    predictions_sha256: str
    recording_s_per_event: float
    schema: str = SAMPLES_SCHEMA
