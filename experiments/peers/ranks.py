"""One rank of one system: waits for commands, asleep on its socket, and trains when it is asked to."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.data import load_dataset
from dpsim.experiments.peers.agreement import CHECKED_STEPS, gradient_errors
from dpsim.experiments.peers.setting import OWN, OwnSetting, TorchSetting, Work
from dpsim.harness.bench.turns import obey
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.progress import Progress
from dpsim.replica import Array
from dpsim.runtime.trainer import Trainer


class Training(Protocol):
    """The training of a system with one setting, on one rank. Its steps are collective."""

    def step(self, *, communicate: bool) -> None:
        """Make one optimizer update; without communication, of a copy that trains on each rank by itself."""

    def loss_sums(self) -> list[float]:
        """Return the losses of the steps since the last call, summed over this rank's samples."""

    def gradients(self) -> dict[str, Array]:
        """Return gradients of the last communicating step, means over the global batch, in dpsim's names and layout."""

    def close(self) -> None: ...


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


def serve_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> None:
    """Run the commands ``build``, ``visit`` and ``drop`` that come through the socket, until it is closed."""
    work = codec.decode(argument["work"], Work, "work of the peers")
    make = _factory(comm, argument["system"], Path(argument["folder"]), work)
    trainings: dict[int, Training] = {}

    def build(training: int, setting: Any, save: bool, reference: str) -> dict[str, Any]:
        trainings[training] = make(setting)
        reply = _check(comm, trainings[training], Path(reference), save=save)
        gc.collect()
        gc.freeze()
        return reply

    def visit(training: int, steps: int, communicate: bool) -> dict[str, Any]:
        return _visit(comm, trainings[training], steps, communicate=communicate)

    def drop(training: int) -> dict[str, Any]:
        trainings.pop(training).close()
        gc.unfreeze()
        gc.collect()
        return {}

    obey({"build": build, "visit": visit, "drop": drop}, {"rank": comm.rank}, argument["socket"])


def _factory(comm: MPI.Intracomm, system: str, folder: Path, work: Work) -> Callable[[Any], Training]:
    """Return the function that builds a training from its setting (plain values)."""
    if system == OWN:
        return lambda plain: OwnTraining(comm, work, codec.decode(plain, OwnSetting, "setting"))
    from dpsim.experiments.peers.torch_training import TorchTraining, join_group

    join_group(comm, folder)
    return lambda plain: TorchTraining(comm, work, codec.decode(plain, TorchSetting, "setting"))


def _check(comm: MPI.Intracomm, training: Training, reference: Path, *, save: bool) -> dict[str, Any]:
    """Take the first steps; reply this rank's loss sums and, on rank 0, the errors of the first gradients.

    They are compared with those in the file ``reference``, into which ``save`` writes them first.
    """
    reply: dict[str, Any] = {}
    training.step(communicate=True)
    if comm.rank == 0:
        gradients = training.gradients()
        if save:
            np.savez(reference, **gradients)  # type: ignore[arg-type]  # names are the tensors'
        with np.load(reference) as saved:
            reply["gradient_errors"] = gradient_errors(gradients, dict(saved))
    for _ in range(CHECKED_STEPS - 1):
        training.step(communicate=True)
    reply["loss_sums"] = training.loss_sums()
    return reply


def _visit(comm: MPI.Intracomm, training: Training, steps: int, *, communicate: bool) -> dict[str, Any]:
    """Take ``steps`` steps; reply when each ended, on the machine's clock."""
    comm.Barrier()
    end_s = []
    for _ in range(steps):
        training.step(communicate=communicate)
        end_s.append(now())
    return {"end_s": end_s, "loss_sums": training.loss_sums()}
