"""What the ranks of a study are given."""

from __future__ import annotations

from dpsim.codec import Noun
from dpsim.machine import Machine
from dpsim.records.sweep import Experiment, Predictions
from dpsim.setting import Setting
from dpsim.study.calibration import CalibrateConfig
from dpsim.study.inputs import Inputs, Needed
from dpsim.study.rows import CalibratedCollective
from dpsim.study.samples import Samples
from dpsim.torch_ddp.request import ScriptRequest
from dpsim.workload import Workload


class SweepTask(Noun, frozen=True):
    """An experiment to predict and measure into ``folder``, or to go on with.

    ``predictions`` and ``before`` are those of an interrupted run.
    """

    experiment: Experiment
    needed: Needed
    folder: str
    predictions: Predictions | None = None
    before: Samples | None = None


class ScriptTask(Noun, frozen=True):
    """The visits of one place of an experiment with a script: to its profile and calibration, and to ``settings``.

    ``place`` counts the places of ``inputs``, which are None where nothing is profiled or calibrated here. Without
    ``before`` there are first rounds alone, of ``first_s`` or twice that; else the settings are measured for the
    experiment's budget, and after every round the samples are saved to ``save_to``. Ranks of dpsim's own runtime wait
    for the times of ``workload``, as ``machine`` slows them down. ``meeting`` is the folder in which all meet.
    """

    experiment: Experiment
    inputs: Inputs | None
    place: int
    meeting: str
    first_s: float = 0.0
    settings: tuple[Setting, ...] = ()
    before: Samples | None = None
    save_to: str = ""
    workload: Workload | None = None
    machine: Machine | None = None

    @property
    def collectives(self) -> list[CalibratedCollective]:
        """What is calibrated at this place."""
        return [] if self.inputs is None else self.inputs.calibrations[self.place].collectives(self.place)

    @property
    def sets_local_batch(self) -> bool:
        """Whether the batch of the script's data loaders is that of the setting."""
        return "local_batch" in self.experiment.axes

    def request(self, local_batch: int) -> ScriptRequest:
        """Return how the script is profiled at a local batch."""
        experiment = self.experiment
        return ScriptRequest(
            script=experiment.script,
            arguments=experiment.arguments,
            devices=max(map(int, experiment.values("devices"))),
            local_batch=local_batch if self.sets_local_batch else None,
        )

    @property
    def members(self) -> list[tuple[int, Setting | int | CalibrateConfig]]:
        """Who takes part, with their ranks: settings, cases of the profile by their batch, the calibration."""
        found: list[tuple[int, Setting | int | CalibrateConfig]] = [(each.plan.devices, each) for each in self.settings]
        if self.inputs is not None:
            calibration = self.inputs.calibrations[self.place]
            found += self.inputs.profiles[self.place].cases
            found.append((calibration.layouts()[-1][0], calibration))
        return found

    @property
    def ranks(self) -> int:
        """How many processes take part, the one that gives the turns included."""
        return 1 + sum(ranks for ranks, _ in self.members)
