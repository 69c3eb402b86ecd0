"""The task of the ranks that measure a sweep, and the samples that they save after every round."""

from __future__ import annotations

from pathlib import Path

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.harness.measurement.environment import stamp
from dpsim.machine import Machine
from dpsim.progress import Progress
from dpsim.records.sweep import Experiment, MeasuredPoint, Predictions
from dpsim.setting import Setting
from dpsim.workload import Workload

SAMPLES_SCHEMA = "dpsim.samples/3"


class Samples(Noun, frozen=True):
    """The samples so far; the file is replaced as a whole after every round.

    ``complete``: no more will be taken for them.
    """

    points: tuple[MeasuredPoint, ...]
    spent_s: float
    measured_from: str
    experiment: Experiment
    predictions_sha256: str
    recording_s_per_event: float
    schema: str = SAMPLES_SCHEMA
    complete: bool = False

    @property
    def next_round(self) -> int:
        """The number of the first round that is not measured yet."""
        return 1 + max((number for point in self.points for number in point.round), default=-1)

    def of(self, setting: Setting) -> MeasuredPoint | None:
        """What was measured of a setting so far."""
        return next((point for point in self.points if point.setting == setting), None)


def samples_before(path: Path, predictions: Predictions, progress: Progress) -> Samples:
    """The samples of an interrupted run, or none where nothing was interrupted.

    Raises ``ConfigError`` where they were measured for other predictions.
    """
    sha = codec.digest(predictions)
    if not path.exists():
        return Samples(
            points=(),
            spent_s=0.0,
            measured_from=stamp(),
            experiment=predictions.experiment,
            predictions_sha256=sha,
            recording_s_per_event=0.0,
        )
    samples = codec.read(path, Samples, "samples", SAMPLES_SCHEMA)
    if samples.predictions_sha256 != sha:
        raise ConfigError(
            f"{path} was measured for other predictions than those in {path.parent}",
            allowed="samples of the same sweep",
            remedy="choose another folder with --output; nothing in this one was changed",
        )
    progress(f"continuing an interrupted sweep after {samples.spent_s:.0f} s of measuring")
    return samples


class MeasureTask(Noun, frozen=True):
    """The settings to measure, in a fixed order, what was measured ``before``, and where to save the samples.

    ``places`` are those of each setting's workload and machine.
    """

    experiment: Experiment
    settings: tuple[Setting, ...]
    places: tuple[tuple[int, int], ...]
    workloads: tuple[Workload, ...]
    machines: tuple[Machine, ...]
    before: Samples
    save_to: str
