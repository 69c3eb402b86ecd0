"""The training by dpsim: its runtime, with one setting."""

from __future__ import annotations

from mpi4py import MPI

from dpsim.data import load_dataset
from dpsim.experiments.peers.setting import OwnSetting, Work
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.replica import Array
from dpsim.runtime.trainer import Trainer


class OwnTraining:
    """A ``Trainer`` on all ranks, and one of a single device on each rank, for steps without communication."""

    def __init__(self, comm: MPI.Intracomm, work: Work, setting: OwnSetting) -> None:
        self._work, self._setting = work, setting
        self._together = _trainer(comm, work, setting)
        self._alone: Trainer | None = None
        self._losses: list[float] = []

    def step(self, *, communicate: bool) -> None:
        if communicate:
            trainer = self._together
        else:
            self._alone = trainer = self._alone or _trainer(MPI.COMM_SELF, self._work.alone(), self._setting)
        self._losses.append(trainer.step().sums.loss)

    def loss_sums(self) -> list[float]:
        losses, self._losses = self._losses, []
        return losses

    def gradients(self) -> dict[str, Array]:
        return {name: value / self._work.global_batch for name, value in self._together.runner.gradients.items()}

    def close(self) -> None:
        for trainer in (self._together, self._alone):
            if trainer is not None:
                trainer.close()


def _trainer(comm: MPI.Intracomm, work: Work, setting: OwnSetting) -> Trainer:
    dataset = load_dataset(work.dataset, work.seed)
    replica = build_model(work.token, dataset.input_shape, dataset.classes)
    return Trainer(replica, dataset, setting.plan(work), comm, Network(), seed=work.seed)
