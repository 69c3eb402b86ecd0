"""Tasks of the tests of training in the memory of devices: GPUs, or numba's CUDA simulator."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from typing import Any
from unittest import mock

import numpy as np
from late_device import LateDevice, Stream, late_devices
from layer_reference import TwinMemory
from mpi4py import MPI
from ranks_cuda import Nobody
from ranks_runtime import open_trainer

from dpsim import codec
from dpsim.comm.cuda import transport as transport_module
from dpsim.comm.cuda.available import simulating
from dpsim.comm.cuda.memory import DeviceMemory
from dpsim.comm.cuda.paths import Path
from dpsim.comm.cuda.peer_access import PeerAccess
from dpsim.comm.cuda.reproducible import DEFAULTS, REQUIRED
from dpsim.comm.cuda.transport import CudaTransport
from dpsim.data import load_dataset
from dpsim.errors import ConfigError, NotFiniteError
from dpsim.memory import HOST
from dpsim.nn import Network
from dpsim.nn.device_ops import DeviceOps
from dpsim.processor import LAYERS_VARIABLE
from dpsim.progress import Progress
from dpsim.runtime.recorder import StepMarks, timeline
from dpsim.runtime.snapshot import restore, snapshot
from dpsim.runtime.trainer import Trainer
from dpsim.timeline import Timeline


def run(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """All that the tests ask of ranks, in one job: see the functions below. A simulated device is a late one."""
    with late_devices() if simulating() else contextlib.nullcontext():
        return ran(comm, argument)


def ran(comm: MPI.Intracomm, argument: dict[str, Any]) -> dict[str, Any]:
    return {
        "trained": {case["name"]: trained(comm, case, argument["steps"]) for case in argument["cases"]},
        "resumed": resumed(comm, argument["cases"][0]),
        "not_finite": comm.allgather(not_finite(comm, argument["cases"][0])),
        "refused": comm.allgather(refused(comm, argument["cases"][0])),
        "settings": comm.allgather({name: os.environ.get(name) for name in {**REQUIRED, **DEFAULTS}}),
        "other_settings": comm.allgather(other_settings(comm, argument["cases"][0])),
        "other_layers": comm.allgather(other_layers(comm, argument["cases"][0])),
        "faults": comm.allgather(faults(comm, argument["cases"][0])) if simulating() else [],
    }


@contextlib.contextmanager
def flags(comm: MPI.Intracomm, wanted: bool) -> Any:
    """While it is open, kernels wait for each other inside, if that is wanted.

    On GPUs the transport itself finds out whether they can.
    """
    path = Path(name="peer memory", access=PeerAccess(mapping="simulated", mode="flags"))
    patched = mock.patch.object(transport_module, "find_path", lambda *_: path)
    with patched if wanted and simulating() else contextlib.nullcontext():
        yield


def opened(comm: MPI.Intracomm, case: dict[str, Any], where: str, dataset: Any = None) -> Trainer:
    """A trainer of a case: on the ``device``, its ``twin`` of the same operations on the host, or as on the ``cpu``."""
    ops = DeviceOps(TwinMemory() if case["kernels"] else HOST) if where == "twin" else None
    backend = "cuda" if where == "device" else "cpu"
    hidden = mock.patch("dpsim.replica.DeviceReplica", Nobody) if case["own_model"] else contextlib.nullcontext()
    os.environ[LAYERS_VARIABLE] = "" if case["kernels"] else "cupy"
    with flags(comm, case["flags"]), hidden:
        return open_trainer(comm, case | {"backend": backend}, dataset, ops)


def trained(comm: MPI.Intracomm, case: dict[str, Any], steps: int) -> dict[str, Any]:
    """Digests, losses and tests of every place that the case names, and how often each step fetched from the device."""
    results: dict[str, Any] = {}
    for where in case["where"]:
        trainer = opened(comm, case, where)
        if where == "device" and comm.rank == comm.size - 1:
            out_of_step(trainer)
        memory = trainer.runner.memory
        fetches, losses, marks = [], [], []
        for _ in range(steps):
            before = memory.fetches if isinstance(memory, DeviceMemory) else 0
            outcome = trainer.step()
            losses.append(outcome.sums)
            marks.append(outcome.marks)
            fetches.append(memory.fetches - before if isinstance(memory, DeviceMemory) else 0)
        test = trainer.evaluate()
        results[where] = {
            "digests": comm.allgather(trainer.digest()),
            "losses": comm.allgather([(sums.slot_losses, sums.correct) for sums in losses]),
            "test": (test.loss, test.correct, test.samples),
            "fetches": sorted({count for counts in comm.allgather(fetches) for count in counts}),
            "on_device": isinstance(memory, DeviceMemory),
            "recorded": (trainer.computed_on, trainer.libraries),
            "timeline": codec.to_builtins(recorded(comm, trainer, marks).to_record()),
            "copied_nothing": produced_where_it_is_reduced(trainer),
        }
        trainer.close()
    return results


def recorded(comm: MPI.Intracomm, trainer: Trainer, marks: list[StepMarks]) -> Timeline:
    """The timeline of some steps on all ranks."""
    steps = list(zip(*comm.allgather(marks), strict=True))
    return timeline(steps, trainer.runner.program.names, emulated_network=False)


def out_of_step(trainer: Trainer) -> None:
    """Let this rank's gradients come later than those of the others."""
    ready = trainer.runner.gradients_ready

    def late(layer: int) -> None:
        time.sleep(5e-3)
        ready(layer)

    trainer.runner.gradients_ready = late  # type: ignore[method-assign]


def produced_where_it_is_reduced(trainer: Trainer) -> bool:
    """Whether the arena's gradients are the memory that kernels of all ranks reduce."""
    transport = trainer.transport
    if not isinstance(transport, CudaTransport) or transport.peer_allreduce is None:
        return False
    if not isinstance(trainer.runner.memory, DeviceMemory):  # the host's gradients are copied to the device
        return False
    address = transport.memory.address
    return all(
        address(slot) == address(transport.peer_allreduce.own(number))
        for number, slot in enumerate(trainer.runner.arena.slots)
    )


def resumed(comm: MPI.Intracomm, case: dict[str, Any]) -> dict[str, Any]:
    """Two steps and a checkpoint on the device, and two more there and on the host: the digests of both."""
    first = opened(comm, case, "device")
    for _ in range(2):
        first.step()
    first.log.gather()
    checkpoint = snapshot(first, first.log.losses, {})
    if checkpoint is not None:  # it may share the memory of a trainer on the host
        tensors = {name: np.array(value) for name, value in checkpoint.tensors.items()}
        checkpoint = dataclasses.replace(checkpoint, tensors=tensors)
    digests = {}
    for where in ("device", "twin"):
        trainer = opened(comm, case, where)
        restore(trainer, checkpoint, lambda _: None)
        for _ in range(2):
            trainer.step()
        digests[where] = comm.allgather(trainer.digest())
        trainer.close()
    for _ in range(2):
        first.step()
    digests["without a stop"] = comm.allgather(first.digest())
    first.close()
    return digests


def not_finite(comm: MPI.Intracomm, case: dict[str, Any]) -> str:
    """What this rank says of a NaN in the data of the last rank."""
    dataset = load_dataset(case["dataset"])
    if comm.rank == comm.size - 1:
        dataset.train_x[:] = np.nan
    trainer = opened(comm, case | {"plan": case["plan"] | {"overlap": "off"}}, "device", dataset)
    before = trainer.digest()
    try:
        trainer.step()
    except NotFiniteError as error:
        assert trainer.digest() == before, "parameters have changed"
        return str(error)
    finally:
        comm.Barrier()
        trainer.close()
    return "nothing"


def refused(comm: MPI.Intracomm, case: dict[str, Any]) -> str:
    """What this rank says where a leaf has other bits alone than amid others, on the last rank."""
    differs = "the forward pass" if comm.rank == comm.size - 1 else None
    with mock.patch.object(Network, "leaf_difference", lambda *_: differs):
        return refusal(comm, case)


def refusal(comm: MPI.Intracomm, case: dict[str, Any]) -> str:
    """What this rank says where a training on the device is refused."""
    try:
        opened(comm, case, "device").close()
    except ConfigError as error:
        return str(error)
    return "nothing"


def other_settings(comm: MPI.Intracomm, case: dict[str, Any]) -> str:
    """What this rank says where the last rank has a variable that cuBLAS reads, of another value."""
    other = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"} if comm.rank == comm.size - 1 else {}
    with mock.patch.dict(os.environ, other):
        return refusal(comm, case)


def other_layers(comm: MPI.Intracomm, case: dict[str, Any]) -> str:
    """What this rank says where the last rank alone computes layers by this project's kernels."""
    return refusal(comm, case | {"kernels": comm.rank == comm.size - 1})


def faults(comm: MPI.Intracomm, case: dict[str, Any]) -> list[str]:
    """What this rank says where its device fails in the second step, in either stream, and messages are polled for.

    All ranks' devices fail at the same place, so that none waits for the others. The trainers cannot be closed.
    """
    said = []
    streams = ("computing", "communicating")
    for overlap, failing in itertools.product(("off", "poll", "thread"), streams[: min(comm.size, 2)]):
        trainer = opened(comm, case | {"plan": case["plan"] | {"overlap": overlap}}, "device")
        trainer.step()
        assert isinstance(trainer.transport, CudaTransport) and isinstance(trainer.transport.device, LateDevice)
        stream = trainer.transport.device.streams[streams.index(failing)]
        stream.fails_at = stream.asked + 3
        try:
            trainer.step()
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
        trainer.runner.close()
        Stream.fault = False
    return said
