"""The samples of a sweep, which its ranks save after every round."""

from __future__ import annotations

from pathlib import Path

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.progress import Progress
from dpsim.records.sweep import Experiment, MeasuredPoint, Predictions
from dpsim.setting import Setting
from dpsim.study.environment import stamp
from dpsim.study.inputs import Inputs

SAMPLES_SCHEMA = "dpsim.samples/3"


class Samples(Noun, frozen=True):
    """The samples so far; the file is replaced as a whole after every round.

    ``complete``: no more will be taken for them. ``inputs`` are what was profiled and calibrated in turns with them.
    """

    points: tuple[MeasuredPoint, ...]
    spent_s: float
    measured_from: str
    experiment: Experiment
    predictions_sha256: str
    recording_s_per_event: float
    schema: str = SAMPLES_SCHEMA
    complete: bool = False
    inputs: Inputs | None = None

    @property
    def next_round(self) -> int:
        """The number of the first round that is not measured yet."""
        return 1 + max((number for point in self.points for number in point.round), default=-1)

    def of(self, setting: Setting) -> MeasuredPoint | None:
        """What was measured of a setting so far."""
        return next((point for point in self.points if point.setting == setting), None)


def samples_for(predictions: Predictions) -> Samples:
    """Return the samples of a run that begins: none."""
    return Samples(
        points=(),
        spent_s=0.0,
        measured_from=stamp(),
        experiment=predictions.experiment,
        predictions_sha256=codec.digest(predictions),
        recording_s_per_event=0.0,
    )


def samples_before(path: Path, predictions: Predictions, progress: Progress) -> Samples:
    """The samples of an interrupted run, or none where nothing was interrupted.

    Raises ``ConfigError`` where they were measured for other predictions.
    """
    if not path.exists():
        return samples_for(predictions)
    samples = codec.read(path, Samples, "samples", SAMPLES_SCHEMA)
    if samples.predictions_sha256 != codec.digest(predictions):
        raise ConfigError(
            f"{path} was measured for other predictions than those in {path.parent}",
            allowed="samples of the same sweep",
            remedy="choose another folder with --output; nothing in this one was changed",
        )
    progress(f"continuing an interrupted sweep after {samples.spent_s:.0f} s of measuring")
    return samples
