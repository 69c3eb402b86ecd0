"""What the ranks of a calibration and of a measurement of PyTorch's DDP are asked for."""

from __future__ import annotations

from dpsim.codec import Noun
from dpsim.collective import Collective
from dpsim.constraints import Runtime
from dpsim.harness.sweep.samples import Samples
from dpsim.machine import Machine
from dpsim.setting import Setting
from dpsim.study.rows import CalibratedCollective
from dpsim.workload import Workload


class CalibrationTask(Noun, frozen=True):
    """The allreduces to calibrate: those of one runtime on one network, up to ``max_bytes``, for ``seconds``.

    ``folder`` is where the ranks meet.
    """

    network: str
    runtime: Runtime
    algorithm: str
    overlap: str
    devices: tuple[int, ...]
    max_bytes: int
    seconds: float
    folder: str

    def collectives(self) -> list[CalibratedCollective]:
        """Return what is calibrated: the allreduce on each number of devices, alone and beside backward."""
        overlaps = ("", "thread") if self.overlap == "thread" else ("",)
        return [
            CalibratedCollective(collective=Collective(algorithm=self.algorithm, devices=devices), overlap=overlap)
            for devices in self.devices
            for overlap in overlaps
        ]


class MeasureTask(Noun, frozen=True):
    """The settings to measure in turn, each by ranks of its own that run ``script``.

    Ranks of dpsim's own runtime wait for the times of ``workload`` instead, as ``machine`` slows them down. World rank
    0 only gives the turns. ``budget_s`` bounds the measuring, and ``interval`` is how narrow the intervals of the
    medians have to be. ``folder`` is where the ranks meet. With ``sets_local_batch`` the batch size of the script's
    data loaders is that of the setting. After every round the samples are saved to ``save_to``, those from ``before``
    an interruption included.
    """

    settings: tuple[Setting, ...]
    script: str
    arguments: tuple[str, ...]
    seed: int
    budget_s: float
    interval: float
    folder: str
    before: Samples
    save_to: str
    sets_local_batch: bool = False
    workload: Workload | None = None
    machine: Machine | None = None

    @property
    def ranks(self) -> int:
        """How many processes that takes."""
        return 1 + sum(setting.plan.devices for setting in self.settings)
