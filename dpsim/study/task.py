"""What the ranks of a study are given, and the samples of a sweep, which they save after every round."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from dpsim import codec
from dpsim.codec import Noun
from dpsim.constraints import FSDP, HOOK
from dpsim.dates import stamp
from dpsim.errors import ConfigError
from dpsim.machine import Machine
from dpsim.progress import Progress
from dpsim.records.sweep import Experiment, MeasuredPoint, Predictions
from dpsim.setting import Setting
from dpsim.strategy import parse_strategy
from dpsim.study.calibration import CalibrateConfig
from dpsim.study.inputs import Inputs, Needed
from dpsim.study.rows import CalibratedCollective, ProfiledBatch
from dpsim.torch.script.request import Part, ScriptRequest
from dpsim.workload import Workload

SAMPLES_SCHEMA = "dpsim.samples/3"
_HOOK = "dpsim.torch:allreduce_hook"


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
    experiment's budget, ``limit_s`` at most, and after every round the samples are saved to ``save_to``. Ranks of
    dpsim's own runtime wait for the times of ``workload``, as ``machine`` slows them down. ``meeting`` is the folder in
    which all meet.
    """

    experiment: Experiment
    inputs: Inputs | None
    place: int
    meeting: str
    first_s: float = 0.0
    settings: tuple[Setting, ...] = ()
    before: Samples | None = None
    save_to: str = ""
    limit_s: float = math.inf
    workload: Workload | None = None
    machine: Machine | None = None

    @property
    def collectives(self) -> list[CalibratedCollective]:
        """What is calibrated at this place."""
        return [] if self.inputs is None else self.inputs.calibrations[self.place].collectives(self.place)

    @property
    def network(self) -> str:
        """The network of this place."""
        return self.settings[0].network if self.inputs is None else self.inputs.calibrations[self.place].network

    @property
    def calibrates_shards(self) -> bool:
        """Whether the collectives of FSDP are calibrated at this place."""
        return self.inputs is not None and self.inputs.calibrations[self.place].runtime == FSDP

    @property
    def sets_local_batch(self) -> bool:
        """Whether the batch of the script's data loaders is that of the setting."""
        return len(self.experiment.values("local_batch")) > 1

    @property
    def sets_accumulation(self) -> bool:
        """Whether the script accumulates over as many micro-batches as the setting has."""
        return len(self.experiment.values("accumulate")) > 1

    def request(self, local_batch: int) -> ScriptRequest:
        """Return how the script is profiled at a local batch."""
        experiment = self.experiment
        return ScriptRequest(
            script=experiment.script,
            arguments=experiment.arguments,
            devices=max(map(int, experiment.values("devices"))),
            local_batch=local_batch if self.sets_local_batch else None,
            fully_shard=self.calibrates_shards,
            replicas=1 if self.inputs is None else self._replicas(self.inputs.calibrations[self.place].strategy),
        )

    @staticmethod
    def _replicas(strategy: str) -> int:
        return parse_strategy(strategy).replicas

    @property
    def parts(self) -> list[Part]:
        """Who takes part: settings, cases of the profile, the calibration."""
        return [self._part(number, ranks, subject) for number, (ranks, subject) in enumerate(self.members)]

    def _part(self, number: int, ranks: int, subject: Setting | ProfiledBatch | CalibrateConfig) -> Part:
        of_script: dict[str, Any] = {"script": self.experiment.script, "arguments": self.experiment.arguments}
        if isinstance(subject, Setting):
            return Part(
                kind="train",
                number=number,
                ranks=ranks,
                local_batch=int(subject.plan.local_batch) if self.sets_local_batch else None,
                accumulate=subject.plan.accumulate if self.sets_accumulation else None,
                fully_shard=subject.runtime == FSDP,
                replicas=self._replicas(subject.plan.strategy),
                on_gpus=subject.runtime == "torch-ddp-nccl",
                hook=_HOOK if subject.runtime == HOOK else "",
                bucket_cap_bytes=subject.plan.fusion_threshold_bytes,
                **of_script,
            )
        if isinstance(subject, ProfiledBatch):
            asked = self.request(subject.local_batch)
            given = {name: getattr(asked, name) for name in ("devices", "local_batch", "fully_shard", "replicas")}
            given["accumulate"] = subject.accumulate if subject.accumulate > 1 else None
            return Part(kind="profile", number=number, ranks=ranks, **given, **of_script)
        counts = tuple(devices for devices, _ in subject.layouts())
        replicas = self._replicas(subject.strategy)
        given = {"fully_shard": self.calibrates_shards, "counts": counts, "replicas": replicas}
        return Part(kind="collectives", number=number, ranks=ranks, **given)

    @property
    def by_mpi(self) -> bool:
        """Whether DDP communicates by dpsim's own transports here, which are MPI's, and dpsim's ranks may be beside."""
        return any(setting.runtime == "torch-ddp-mpi" for setting in self.settings) or (
            self.inputs is not None and self.inputs.calibrations[self.place].runtime == "torch-ddp-mpi"
        )

    @property
    def members(self) -> list[tuple[int, Setting | ProfiledBatch | CalibrateConfig]]:
        """The ranks of each part, and what they do: a setting, a profile at a local batch, or the calibration."""
        members: list[tuple[int, Setting | ProfiledBatch | CalibrateConfig]] = []
        members += [(each.plan.devices, each) for each in self.settings]
        if self.inputs is not None:
            calibration = self.inputs.calibrations[self.place]
            members += [(each.devices, each) for each in self.inputs.profiles[self.place].subjects(self.place)]
            members.append((calibration.ranks, calibration))
        return members

    @property
    def ranks(self) -> int:
        """How many processes take part, the one that gives the turns included."""
        return sum(self.on_hosts)

    @property
    def on_hosts(self) -> list[int]:
        """How many of them are first ranks, second ones and so on: those share a host, where ranks have hosts."""
        of_parts = [ranks for ranks, _ in self.members]
        return [(rank == 0) + sum(rank < ranks for ranks in of_parts) for rank in range(max(of_parts))]


class ObserveTask(Noun, frozen=True):
    """A script whose training is observed, and the network of its ranks, which meet in a folder."""

    part: Part
    meeting: str
    network: str = "node"

    @property
    def parts(self) -> list[Part]:
        """Who takes part: one alone."""
        return [self.part]

    @property
    def ranks(self) -> int:
        """How many processes take part, the one that gives the turns included."""
        return 1 + self.part.ranks
