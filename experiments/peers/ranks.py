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
from dpsim.experiments.peers.agreement import CHECKED_STEPS, gradient_errors
from dpsim.experiments.peers.setting import OWN, OwnSetting, TorchSetting, Work
from dpsim.harness.bench.turns import obey
from dpsim.progress import Progress
from dpsim.replica import Array


class Training(Protocol):
    """The training of a system with one setting, on one rank. Its steps are collective."""

    def step(self, *, communicate: bool) -> None:
        """One optimizer update; without communication, of a copy that trains on each rank by itself."""

    def loss_sums(self) -> list[float]:
        """Losses of the steps since the last call, summed over this rank's samples."""

    def gradients(self) -> dict[str, Array]:
        """Gradients of the last communicating step, means over the global batch, by dpsim's names and layout."""

    def close(self) -> None: ...


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
    """The function that builds a training from its setting (plain values)."""
    if system == OWN:
        from dpsim.experiments.peers.own_training import OwnTraining

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
