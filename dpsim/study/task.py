"""``SweepTask``: what the ranks of a sweep are given."""

from __future__ import annotations

from dpsim.codec import Noun
from dpsim.harness.sweep.samples import Samples
from dpsim.records.sweep import Experiment, Predictions
from dpsim.study.inputs import Needed


class SweepTask(Noun, frozen=True):
    """An experiment to predict and measure into ``folder``, or to go on with.

    ``predictions`` and ``before`` are those of an interrupted run.
    """

    experiment: Experiment
    needed: Needed
    folder: str
    predictions: Predictions | None = None
    before: Samples | None = None
