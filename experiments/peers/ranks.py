"""One rank of one system: waits for commands, asleep on its socket, and trains when it is asked to."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.data import load_dataset
from dpsim.experiments.peers.result import CHECKED_STEPS, gradient_errors
from dpsim.experiments.peers.setting import OWN, Change, Work
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.progress import Progress
from dpsim.replica import Array
from dpsim.runtime.trainer import Trainer
from dpsim.study.runners.allreduce.turns import obey


class OwnTraining:
    """A ``Trainer`` on all ranks, or without communication one of a single device on each rank.

    Its steps are collective, unless each rank trains by itself.
    """

    def __init__(self, comm: MPI.Intracomm, work: Work, setting: Change, *, communicate: bool) -> None:
        comm, work = (comm, work) if communicate else (MPI.COMM_SELF, work.alone())
        dataset = load_dataset(work.dataset, work.seed)
        replica = build_model(work.token, dataset.input_shape, dataset.classes)
        self._work = work
        self._trainer = Trainer(replica, dataset, work.plan(setting), comm, Network(), seed=work.seed)
        self.close = self._trainer.close

    def step(self) -> float:
        """Make one optimizer update; return the loss, summed over this rank's samples."""
        return self._trainer.step().sums.loss

    def gradients(self) -> dict[str, Array]:
        """Return the gradients of the last step, means over the global batch."""
        return {name: value / self._work.global_batch for name, value in self._trainer.runner.gradients.items()}


def serve_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> None:
    """Run the commands ``build``, ``visit`` and ``drop`` that come through the socket, until it is closed."""
    work = codec.decode(argument["work"], Work, "work of the peers")
    make: Any = OwnTraining
    if argument["system"] != OWN:
        from dpsim.experiments.peers.torch_training import TorchTraining, join_group

        join_group(comm, Path(argument["folder"]))
        make = TorchTraining
    settings: dict[int, Change] = {}
    made: dict[tuple[int, bool], Any] = {}

    def visit(training: int, steps: int, communicate: bool) -> dict[str, Any]:
        """Take ``steps`` steps; reply when each ended, on the machine's clock."""
        if (training, communicate) not in made:
            made[training, communicate] = make(comm, work, settings[training], communicate=communicate)
        trained, losses, end_s = made[training, communicate], [], []
        comm.Barrier()
        for _ in range(steps):
            losses.append(trained.step())
            end_s.append(now())
        return {"end_s": end_s, "loss_sums": list(map(float, losses))}

    def build(training: int, setting: Change, save: bool, reference: str) -> dict[str, Any]:
        """Take the first steps; reply this rank's loss sums and, on rank 0, the errors of the first gradients.

        They are compared with those in the file ``reference``, into which ``save`` writes them first.
        """
        settings[training] = setting
        reply: dict[str, Any] = {"loss_sums": visit(training, 1, True)["loss_sums"]}
        if comm.rank == 0:
            gradients = made[training, True].gradients()
            if save:
                np.savez(reference, **gradients)
            with np.load(reference) as saved:
                reply["gradient_errors"] = gradient_errors(gradients, dict(saved))
        reply["loss_sums"] += visit(training, CHECKED_STEPS - 1, True)["loss_sums"]
        gc.collect()
        gc.freeze()
        return reply

    def drop(training: int) -> dict[str, Any]:
        for communicate in (True, False):
            if (trained := made.pop((training, communicate), None)) is not None:
                trained.close()
        gc.unfreeze()
        gc.collect()
        return {}

    obey({"build": build, "visit": visit, "drop": drop}, {"rank": comm.rank}, argument["socket"])
