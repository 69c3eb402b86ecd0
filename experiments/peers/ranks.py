"""One rank of one system: waits for commands, asleep on its socket, and trains when told."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.experiments.peers.agreement import CHECKED_STEPS, gradient_errors
from dpsim.experiments.peers.setting import OWN, OwnSetting, TorchSetting, Work
from dpsim.progress import Progress
from dpsim.replica import Array


class Contender(Protocol):
    """A system with one setting, on one rank. Its steps are collective."""

    def step(self, *, communicate: bool) -> None:
        """One optimizer update; without communication, of a copy that trains on each rank for itself."""

    def loss_sums(self) -> list[float]:
        """Losses of the steps since the last call, summed over this rank's samples."""

    def gradients(self) -> dict[str, Array]:
        """Gradients of the last communicating step, means over the global batch, by dpsim's names and layout."""

    def close(self) -> None: ...


def serve_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> None:
    """Do what comes through the socket until it is closed. Commands: ``build``, ``visit``, ``drop``."""
    work = codec.decode(argument["work"], Work, "work of the peers")
    contenders: dict[int, Contender] = {}
    build = _builder(comm, argument["system"], Path(argument["folder"]), work)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(argument["socket"])
        with line.makefile("rw", encoding="utf-8") as text:
            _say(text, {"rank": comm.rank})
            for command in _commands(text):
                number, reply = command["contender"], {}
                if command["do"] == "build":
                    contenders[number] = build(command["setting"])
                    reply = _check(comm, contenders[number], command)
                    gc.collect()
                    gc.freeze()
                elif command["do"] == "visit":
                    reply = _visit(comm, contenders[number], command["steps"], command["communicate"])
                else:
                    contenders.pop(number).close()
                    gc.unfreeze()
                    gc.collect()
                _say(text, reply)


def _builder(comm: MPI.Intracomm, system: str, folder: Path, work: Work) -> Callable[[Any], Contender]:
    if system == OWN:
        from dpsim.experiments.peers.own import OwnContender

        return lambda plain: OwnContender(comm, work, codec.decode(plain, OwnSetting, "setting"))
    from dpsim.experiments.peers.torch_contender import TorchContender, join_group

    join_group(comm, folder)
    return lambda plain: TorchContender(comm, work, codec.decode(plain, TorchSetting, "setting"))


def _commands(text: Any) -> Iterator[dict[str, Any]]:
    for line in text:
        yield json.loads(line)


def _say(text: Any, reply: dict[str, Any]) -> None:
    text.write(json.dumps(codec.to_builtins(reply)) + "\n")
    text.flush()


def _check(comm: MPI.Intracomm, contender: Contender, command: dict[str, Any]) -> dict[str, Any]:
    """The first steps: this rank's loss sums and, on rank 0, the first gradients saved or compared with saved ones."""
    reply: dict[str, Any] = {}
    contender.step(communicate=True)
    reference = Path(command["reference"])
    if comm.rank == 0 and command["save"]:
        np.savez(reference, **contender.gradients())  # type: ignore[arg-type]  # names are the tensors'
    if comm.rank == 0:
        with np.load(reference) as saved:
            reply["gradient_errors"] = gradient_errors(contender.gradients(), dict(saved))
    for _ in range(CHECKED_STEPS - 1):
        contender.step(communicate=True)
    reply["loss_sums"] = contender.loss_sums()
    return reply


def _visit(comm: MPI.Intracomm, contender: Contender, steps: int, communicate: bool) -> dict[str, Any]:
    """When the first step began and each of them ended, on the machine's clock."""
    comm.Barrier()
    moments_s = [now()]
    for _ in range(steps):
        contender.step(communicate=communicate)
        moments_s.append(now())
    return {"moments_s": moments_s, "loss_sums": contender.loss_sums()}
