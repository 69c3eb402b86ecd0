"""Measures settings of PyTorch's DDP in turn: each has ranks of its own, which wait until it is their turn.

World rank 0 trains nothing: it gives the turns, in rounds and in random order, and keeps the samples. Waiting ranks
sleep in a read from a socket, so that those of one setting have the cores to themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.comm.group import quiet_barrier
from dpsim.errors import ConfigError
from dpsim.harness.measurement.loop import LEAST_ROUNDS
from dpsim.harness.measurement.steps import COUNTED_STEPS, WARM_UP_STEPS, step_times_s
from dpsim.harness.sweep.emulation import Watched, machine_cores
from dpsim.harness.sweep.samples import Samples
from dpsim.harness.sweep.visits import WARM_UP_ROUNDS, SettingSamples, measure
from dpsim.harness.torch_ddp.own_runtime import emulated_workload
from dpsim.harness.torch_ddp.own_runtime_on_ranks import wait_in_turns
from dpsim.harness.torch_ddp.task import MeasureTask
from dpsim.progress import Progress
from dpsim.records.sweep import MeasuredPoint
from dpsim.setting import Setting
from dpsim.torch_ddp.visit import CONTROL, Visit


def measure_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """The ``Samples`` of the settings of a ``MeasureTask`` (plain values), on world rank 0, which saves every round."""
    task = codec.decode(argument, MeasureTask, "measurement")
    if comm.rank == 0:
        address = str(Path(task.folder) / CONTROL)
        with Listener(address, "AF_UNIX", backlog=comm.size) as listener:
            quiet_barrier(comm)  # the other ranks may still be loading PyTorch
            comm.Split(len(task.settings), comm.rank)
            ranks = _accepted(listener, task, report)
            return dict(codec.to_builtins(_measured(task, ranks, report)))
    setting_of_rank = [number for number, setting in enumerate(task.settings) for _ in range(setting.plan.devices)]
    number = setting_of_rank[comm.rank - 1]
    take_turns = _turns_of(task, number)
    quiet_barrier(comm)
    take_turns(comm.Split(number, comm.rank))
    return None


def _turns_of(task: MeasureTask, number: int) -> Callable[[Any], None]:
    """Return what a rank of the ``number``-th setting does with the group of its ranks until the measurement ends.

    It runs the script, or waits for as long as the script computes. Loads torch for the script alone.
    """
    setting = task.settings[number]
    if setting.runtime == "dpsim":
        assert task.workload is not None and task.machine is not None
        workload = emulated_workload(task.workload, task.machine, setting.plan)
        return lambda group: wait_in_turns(group, setting, workload, task.seed, task.folder, number)
    from dpsim.torch_ddp.batches import replace_batch_size
    from dpsim.torch_ddp.timed_script import train_in_turns

    if task.sets_local_batch:
        replace_batch_size(int(setting.plan.local_batch))
    return lambda group: train_in_turns(group, setting, task.script, task.arguments, task.folder, number)


def _accepted(listener: Listener, task: MeasureTask, report: Progress) -> list[list[Connection[int, Visit]]]:
    """The connections to the ranks of each setting, once all have built DDP and wait at their first step."""
    report(f"starting {task.ranks - 1} processes that train {len(task.settings)} settings")
    connections: list[list[Connection[int, Visit]]] = [[] for _ in task.settings]
    for _ in range(task.ranks - 1):
        connection: Any = listener.accept()
        connections[connection.recv()].append(connection)
    for of_setting in connections:
        for connection in of_setting:
            _check_trains(connection.recv(), 0)
    return connections


def _check_trains(visit: Visit, rounds_done: int) -> None:
    if visit.ended:
        raise ConfigError(
            f"the script ended after {rounds_done} rounds of {WARM_UP_STEPS + COUNTED_STEPS} training steps",
            allowed=f"at least {WARM_UP_ROUNDS + LEAST_ROUNDS} rounds: dpsim ends the script itself",
            remedy="let it train longer, or on more data",
        )


class ScriptSetting:
    """A setting whose ranks wait for their turns behind ``connections``, and what was measured of it so far.

    Of when buckets were ready before an interruption only the medians are known.
    """

    def __init__(
        self, setting: Setting, connections: list[Connection[int, Visit]], earlier: MeasuredPoint | None
    ) -> None:
        self.setting, self.connections = setting, connections
        self.samples = SettingSamples(setting, earlier)
        self.bucket_bytes: tuple[int, ...] = earlier.bucket_bytes if earlier else ()
        self.ready_s: list[list[float]] = []
        if earlier and earlier.bucket_ready_s:
            self.ready_s = [list(earlier.bucket_ready_s)] * (len(earlier.step_s) * setting.plan.devices)

    def visit(self, number: int, *, counted: bool) -> bool:
        """See ``Visitor``. Raises ``ConfigError`` where the script ends too early."""
        for attempt in itertools.count():
            for connection in self.connections:
                connection.send(WARM_UP_STEPS + COUNTED_STEPS)
            visits = [connection.recv() for connection in self.connections]
            if any(visit.ended for visit in visits):
                _check_trains(Visit(ended=number < LEAST_ROUNDS), number + WARM_UP_ROUNDS)
                return False
            if not counted or not self.samples.emulation.repeats(_watched(visits), machine_cores(), attempt):
                break
        if counted:
            self._add(visits, number)
        return True

    def _add(self, visits: list[Visit], number: int) -> None:
        if watched := _watched(visits):
            self.samples.emulation.visited(watched, machine_cores())
        times_s = step_times_s([visit.moments_s[1:] for visit in visits])
        if self.bucket_bytes not in ((), visits[0].bucket_bytes):
            raise ConfigError(
                f"{self.setting.describe()}: DDP has buckets of {visits[0].bucket_bytes} bytes, and had buckets of "
                f"{self.bucket_bytes} bytes before",
                allowed="the same buckets throughout a measurement",
                remedy="measure into a new folder with --output, and change nothing in between",
            )
        self.bucket_bytes = visits[0].bucket_bytes
        for step, step_s in self._of_the_batch(visits, list(enumerate(times_s, WARM_UP_STEPS))):
            self.ready_s += [visit.ready_s[step] for visit in visits if visit.ready_s]
            last = min(visits, key=lambda visit: _exposed_s(visit, step))  # the rank that was ready last
            exposed_s = _exposed_s(last, step) if self.setting.plan.devices > 1 else 0.0
            values = {"step_s": step_s, "exposed_communication_s": exposed_s, "round": number}
            self.samples.add(values, {name: logged[step] for name, logged in last.logged_s.items()})

    def _of_the_batch(self, visits: list[Visit], steps: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """The steps on as many samples as the setting has: the last batch of an epoch may be shorter."""
        wanted = self.setting.plan.local_batch
        kept = [
            (step, step_s)
            for step, step_s in steps
            if all(not visit.local_batches or visit.local_batches[step] == wanted for visit in visits)
        ]
        if not kept and not self.samples.step_s:
            raise ConfigError(
                f"{self.setting.describe()}: the script trains on {visits[0].local_batches[-1]} samples at once, "
                f"and was profiled with {wanted}",
                allowed="a script whose steps have the same number of samples, but for the last ones of an epoch",
                remedy="let it train on batches of one size",
            )
        return kept

    def point(self) -> MeasuredPoint:
        """See ``Visitor``."""
        return self.samples.point(
            buckets=len(self.bucket_bytes) if self.setting.plan.devices > 1 else 0,
            bucket_bytes=self.bucket_bytes,
            bucket_ready_s=tuple(np.median(self.ready_s, axis=0).tolist()) if self.ready_s else (),
        )


def _watched(visits: list[Visit]) -> list[Watched]:
    """What ranks that wait instead of computing saw; empty for those that compute."""
    return [visit.watched for visit in visits if visit.watched is not None]


def _exposed_s(visit: Visit, step: int) -> float:
    """What computation waited inside a hook or in dpsim's own runtime, or else communication after the last gradient.

    The latter is by DDP's own times, in which DDP also copies the buckets back to the gradients.
    """
    logged = visit.logged_s
    if visit.waited_s[step] > 0 or not logged:
        return visit.waited_s[step]
    return max(logged["communication"][step] - logged["overlap"][step], 0.0)


def _measured(task: MeasureTask, ranks: list[list[Connection[int, Visit]]], report: Progress) -> Samples:
    """Visit every setting in every round, until all intervals are narrow or the budget is spent."""
    settings = [
        ScriptSetting(setting, connections, task.before.of(setting))
        for setting, connections in zip(task.settings, ranks, strict=True)
    ]
    samples = measure(
        settings,
        task.before,
        Path(task.save_to),
        report,
        budget_s=task.budget_s,
        interval=task.interval,
        seed=task.seed,
    )
    for each in settings:
        for connection in each.connections:
            connection.send(0)
    return samples or task.before
