"""The ranks of a script that MPI has started, where DDP sends by dpsim's transports, and dpsim's own runtime trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.codec import Noun
from dpsim.comm.group import first_ranks, quiet_barrier, quiet_receive
from dpsim.comm.networks import transport
from dpsim.launch.shaped import links
from dpsim.machine import Network
from dpsim.progress import Progress
from dpsim.setting import Setting
from dpsim.study.calibration import CalibrateConfig
from dpsim.study.emulation import emulated_workload
from dpsim.study.runners.observed import observe
from dpsim.study.runners.script import take_turns
from dpsim.study.runners.script_processes import Job
from dpsim.study.runners.training import wait_in_turns
from dpsim.study.task import ObserveTask, ScriptTask
from dpsim.torch.script.probe.in_turns.visit import CONTROL
from dpsim.torch.script.request import Part


class MpiRanks:
    """The ranks of some parts, which MPI has started, and which wait until it is their part's turn to begin."""

    def __init__(self, comm: MPI.Intracomm, parts: Sequence[Part], listener: Listener) -> None:
        self._comm, self._parts, self._listener = comm, parts, listener

    def shape(self, network: Network | None) -> None:
        links.shape(network)

    def start(self, parts: list[int]) -> None:
        for rank, part in enumerate(by_rank(self._parts), 1):
            if part.number in parts:
                self._comm.Send([b"", MPI.BYTE], dest=rank)

    def accept(self) -> Any:
        return self._listener.accept()

    def receive(self, connection: Any) -> Any:
        return connection.recv()


def by_rank(parts: Sequence[Part]) -> list[Part]:
    """Return the part of each rank of a job behind the first: all first ranks of parts come first, then the second."""
    most = max((part.ranks for part in parts), default=0)
    return [part for rank in range(most) for part in parts if rank < part.ranks]


def script_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Do what a ``ScriptTask`` asks for on MPI's ranks; world rank 0 returns it, and takes no part."""
    task = codec.decode(argument, ScriptTask, "task")
    return _on_ranks(comm, task, lambda job: take_turns(task, job, report))


def observe_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Do what an ``ObserveTask`` asks for on MPI's ranks; world rank 0 returns it, and takes no part."""
    task = codec.decode(argument, ObserveTask, "task")
    return _on_ranks(comm, task, lambda job: observe(task, job, report))


def _on_ranks(
    comm: MPI.Intracomm, task: ScriptTask | ObserveTask, lead: Callable[[Job], Noun]
) -> dict[str, Any] | None:
    """Return on world rank 0 what ``lead`` returns. The others load PyTorch, and take the turns that they are given."""
    if comm.rank == 0:
        with Listener(str(Path(task.meeting) / CONTROL), "AF_UNIX", backlog=comm.size) as listener:
            quiet_barrier(comm)
            comm.Split(len(task.parts), comm.rank)
            return dict(codec.to_builtins(lead(MpiRanks(comm, task.parts, listener))))
    part = by_rank(task.parts)[comm.rank - 1]
    quiet_barrier(comm)
    group = comm.Split(part.number, comm.rank)
    quiet_receive(comm)
    _take_part(task, part, group)
    return None


def _take_part(task: ScriptTask | ObserveTask, part: Part, group: Any) -> None:
    """Take the turns of a part as a rank of its group. Loads torch, unless nothing computes there."""
    subject = task.members[part.number][1] if isinstance(task, ScriptTask) else None
    if isinstance(subject, Setting) and subject.runtime == "dpsim":
        assert isinstance(task, ScriptTask) and task.workload is not None and task.machine is not None
        workload = emulated_workload(task.workload, task.machine, subject.plan)
        wait_in_turns(group, subject, workload, task.experiment.seed, task.meeting, part.number)
        return
    from dpsim.torch.script.probe.in_turns.part import take_part
    from dpsim.torch.script.reductions import MpiReduction

    def reduction(of: Any, network: str, algorithm: str, overlap: str) -> MpiReduction:
        return MpiReduction(transport(of, Network.parse(network)), algorithm, overlap)

    quiet_barrier(group)  # others may still be loading PyTorch
    reductions: dict[int, MpiReduction] = {}
    if isinstance(task, ObserveTask):
        reductions[group.size] = reduction(group, task.network, "ring", "thread")
    elif isinstance(subject, Setting) and group.size > 1:
        reductions[group.size] = reduction(group, subject.network, subject.plan.algorithm, subject.plan.overlap)
    elif isinstance(subject, CalibrateConfig):
        overlap = subject.overlaps[0] if subject.overlaps else "inline"
        for devices, _ in subject.layouts():
            if (of_first := first_ranks(group, devices)) is not None:
                reductions[devices] = reduction(of_first, subject.network, subject.algorithms[0], overlap)
    take_part(part, group.rank, task.meeting, reductions)
    for each in reductions.values():
        each.close()
