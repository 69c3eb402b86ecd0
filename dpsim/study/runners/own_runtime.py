"""One rank of dpsim's own runtime, which takes turns with DDP's ranks and waits for profiled times in its own."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now
from dpsim.comm.group import quiet_start
from dpsim.data import Dataset
from dpsim.harness.sweep.emulation import Watch
from dpsim.launch.rank_process import pin
from dpsim.lowering import lower
from dpsim.machine import Network
from dpsim.runtime.emulated import EmulatedReplica, WorkloadReplica
from dpsim.runtime.recorder import exposed_s
from dpsim.runtime.trainer import Trainer
from dpsim.setting import Setting
from dpsim.study.steps import WARM_UP_STEPS
from dpsim.torch_ddp.visit import Turns, Visit
from dpsim.workload import Workload

_BATCHES = 64


def wait_in_turns(
    group: MPI.Intracomm, setting: Setting, workload: Workload, seed: int, folder: str, number: int
) -> None:
    """Take the turns of the ``number``-th setting of a measurement as a rank of ``group``, until there are no more."""
    pin(group)
    plan = setting.plan
    schedule = lower(workload, plan)
    replica = EmulatedReplica(WorkloadReplica(workload), workload, seed=seed, rank=group.rank)
    network = Network.parse(setting.network)
    trainer = Trainer(replica, _samples(plan.global_batch), plan, group, network, seed=seed, schedule=schedule)
    sizes = tuple(int(size) for size in schedule.bucket_size_bytes)
    turns, visit = Turns(folder, number), Visit(bucket_bytes=sizes)
    while (turn := turns.take(visit)).steps:
        visit = _visit(group, trainer, replica, turn.steps, sizes)
    turns.close()
    trainer.close()


def _samples(global_batch: int) -> Dataset:
    """Samples that nobody looks at, some whole batches of them."""
    x, labels = np.zeros((_BATCHES * global_batch, 1), np.float32), np.zeros(_BATCHES * global_batch, np.int64)
    return Dataset(name="none", train_x=x, train_y=labels, test_x=x[:1], test_y=labels[:1], classes=1)


def _visit(
    group: MPI.Intracomm, trainer: Trainer, replica: EmulatedReplica, steps: int, bucket_bytes: tuple[int, ...]
) -> Visit:
    """Take so many steps; what the last ones waited for communication, and how well this rank kept its times."""
    quiet_start(group)
    replica.begin_anew()
    visit = Visit(moments_s=[now()], logged_s={}, bucket_bytes=bucket_bytes)
    watch = Watch()
    for step in range(steps):
        if step == WARM_UP_STEPS:
            watch = Watch()
        marks = trainer.step().marks
        watch.step(replica.lateness_s)
        visit.moments_s.append(marks.end_s)
        visit.waited_s.append(exposed_s(marks))
    visit.watched = watch.seen()
    return visit
