"""Tasks of the tests of ``TorchReplica`` on ranks. Loads torch."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
from late_device import late_devices
from mpi4py import MPI
from torch_modules import CLASSES, MODULES, SHAPE

from dpsim import codec
from dpsim.comm.cuda.available import simulating
from dpsim.data import load_dataset
from dpsim.errors import ConfigError
from dpsim.machine import Network
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime.snapshot import restore, snapshot
from dpsim.runtime.trainer import Trainer
from dpsim.torch.module import TorchReplica

DATA = "synthetic:4x4x1,classes=3,train=24,test=7"


def run(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """Every case trained for some steps, and what a checkpoint brings back. A simulated device is a late one."""
    with late_devices() if simulating() else contextlib.nullcontext():
        return {
            "trained": {case["name"]: trained(comm, case, argument["steps"]) for case in argument["cases"]},
            "resumed": resumed(comm, argument["steps"]),
            "refused": refused(comm),
        }


def opened(comm: MPI.Intracomm, case: dict[str, Any], backend: Any) -> Trainer:
    dataset = load_dataset(DATA)
    assert (dataset.input_shape, dataset.classes) == (SHAPE, CLASSES)
    replica = TorchReplica(MODULES[case["module"]], SHAPE)
    plan = codec.decode({"global_batch": 12, "devices": comm.size, **case["plan"]}, Plan, "plan")
    return Trainer(replica, dataset, plan, comm, Network(), seed=case.get("seed", 0), backend=backend)


def trained(comm: MPI.Intracomm, case: dict[str, Any], steps: int) -> dict[str, Any]:
    """Parameters, losses and digests by backend, and whether PyTorch computes where the ranks' gradients are added."""
    results = {}
    for backend in case["backends"]:
        trainer = opened(comm, case, backend)
        losses = []
        for _ in range(steps):
            outcome = trainer.step()
            losses.append(comm.allreduce(outcome.sums.loss) / outcome.global_samples)
        test = trainer.evaluate()
        with trainer.averaged_state():
            digests = comm.allgather(trainer.digest())
            state = {name: value.tolist() for name, value in trainer.state_on_host().items()}
        runner = trainer.runner
        parameters = runner.arena.on_host(runner.arena.parameters)
        results[backend] = {
            "parameters": {name: value.tolist() for name, value in parameters.items()},
            "losses": losses,
            "test": (test.loss, test.correct, test.samples),
            "digests": digests,
            "state": state,
            "nothing_copied": all(comm.allgather(nothing_copied(trainer))),
            "on_device": trainer.runner.memory.deferred,
        }
        trainer.close()
    return results


def refused(comm: MPI.Intracomm) -> str:
    """What is said of leaves for a module with batch norm."""
    try:
        opened(comm, {"module": "normalised", "plan": {"leaves": 4, "batch_norm": "leaf"}}, "cpu").close()
    except ConfigError as error:
        return str(error)
    return "nothing"


def nothing_copied(trainer: Trainer) -> bool:
    """Whether the module's parameters are in the arena, and the gradients of the pass where a step has one alone."""
    replica, runner = trainer.replica, trainer.runner
    assert isinstance(replica, TorchReplica)
    address, several = runner.memory.address, trainer.plan.leaves or trainer.plan.accumulate > 1
    return all(
        parameter.data_ptr() == address(runner.parameters[name])
        and (several or parameter.grad.data_ptr() == address(runner.gradients[name]))
        for name, parameter in replica.module.named_parameters()
        if parameter.requires_grad
    )


def resumed(comm: MPI.Intracomm, steps: int) -> dict[str, list[str]]:
    """Digests of a training with batch norm that goes on, and of one that goes on from its checkpoint."""
    case = {"module": "normalised", "plan": {"optimizer": {"kind": "adamw"}}}
    first, second = opened(comm, case, "cpu"), opened(comm, case, "cpu")
    for _ in range(steps):
        first.step()
    first.log.gather()
    checkpoint = snapshot(first, first.log.losses, {})
    if checkpoint is not None:
        tensors = {name: np.array(value) for name, value in checkpoint.tensors.items()}
        checkpoint = dataclasses.replace(checkpoint, tensors=tensors)
    restore(second, checkpoint, lambda _: None)
    digests: dict[str, list[str]] = {"without a stop": [], "resumed": []}
    for trainer, name in zip((first, second), digests, strict=True):
        for _ in range(steps):
            trainer.step()
        digests[name] = comm.allgather(trainer.digest())
        trainer.close()
    return digests
