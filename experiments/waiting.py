"""What waiting for the slowest rank adds to a step. ``make accuracy`` measures it.

Ranks with emulated computation train over an emulated link: in one visit every step computes for the same time, in the
next its time is drawn anew on each rank and in each step, from a spread that is known; in some cases the draws have a
part in common, or one rank computes more slowly than the others. Everything else is real and the same. The mean step of
the second, less that of the first, is compared with ``Prediction.waiting_for_slowest_s``.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from typing import Any, Literal

import msgspec
import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.codec import Noun
from dpsim.comm.group import quiet_barrier
from dpsim.data import load_dataset
from dpsim.experiments.cases import Measured, Record, Study
from dpsim.machine import Link, Machine, Network
from dpsim.model.step import price, scheduled
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime.describe import describe
from dpsim.runtime.emulated import EmulatedReplica
from dpsim.runtime.trainer import Trainer
from dpsim.study import models
from dpsim.study.loop import StopRule, in_turns
from dpsim.study.steps import WARM_UP_STEPS, step_times_s
from dpsim.workload import Workload

_STEPS = 8
_QUANTILES = 40
_MODEL, _LINK = "mlp:16", "paced:50us,10gbit"
"""Few bytes on a fast link: what is left of a step beside computation hardly depends on when ranks arrive."""
_UPDATE_S, _OVERHEAD_S = 2e-3, 1e-3
Shape = Literal["normal", "exponential"]


class Case(Noun, frozen=True):
    """So many ranks, each of whose steps computes for ``compute_s`` on average, with this distribution.

    ``deviation`` is its standard deviation over its mean, ``correlation`` the ``step_correlation`` of the workload, and
    ``slow_devices`` the factors of the first ranks, as in ``Machine``.
    """

    devices: int
    shape: Shape
    deviation: float = 0.15
    compute_s: float = 0.04
    rounds: int = 24
    correlation: float = 0.0
    slow_devices: tuple[float, ...] = ()

    @property
    def title(self) -> str:
        correlation = f", correlation {self.correlation:g}" if self.correlation else ""
        slow = "".join(f", one {factor:g} times as slow" for factor in self.slow_devices)
        return f"{self.devices} ranks, {self.shape} spread of {self.deviation:.0%}{correlation}{slow}"


Waiting = Measured[Case]
"""Seconds of the steps of a case: ``equal_s`` where all ranks compute equally long, ``drawn_s`` with the spread.

``predicted_s`` is the predicted ``waiting_for_slowest_s``, ``lateness_s`` by how much ranks missed their moments (the
median): one number each.
"""


def measured_share(of: Waiting) -> float:
    """Return mean step with the spread / mean step without it - 1."""
    return statistics.fmean(of.samples["drawn_s"]) / statistics.fmean(of.samples["equal_s"]) - 1


def predicted_share(of: Waiting) -> float:
    """Return the predicted waiting over the mean step without the spread."""
    return of.samples["predicted_s"][0] / statistics.fmean(of.samples["equal_s"])


def error(of: Waiting) -> float:
    """Return predicted / measured waiting - 1."""
    measured = measured_share(of)
    return predicted_share(of) / measured - 1 if measured > 0 else math.inf


_SHAPES: tuple[Shape, ...] = ("normal", "exponential")
CASES = (
    *(Case(devices=devices, shape=shape) for devices in (2, 4, 8) for shape in _SHAPES),
    Case(devices=4, shape="normal", correlation=0.5),
    *(Case(devices=devices, shape="normal", slow_devices=(1.25,)) for devices in (2, 4)),
)


def quantiles(shape: Shape, deviation: float) -> tuple[float, ...]:
    """Return a ``step_spread`` (see ``Workload``) of mean 1 with this standard deviation, normal or exponential."""
    levels = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    if shape == "normal":
        values = np.array([statistics.NormalDist().inv_cdf(level) for level in levels])
    else:
        values = -np.log1p(-levels)
    values = 1 + deviation * (values - values.mean()) / values.std()
    return tuple(values.tolist())


def workload_of(bare: Workload, case: Case) -> Workload:
    """Return layers that compute for equally long, forward for half as long as backward, without a spread.

    Draws from a spread that is put in have the case's correlation.
    """
    layer_s = (case.compute_s - _UPDATE_S - _OVERHEAD_S) / len(bare.layers)
    layers = tuple(
        msgspec.structs.replace(layer, forward_s=(layer_s / 3,), backward_s=(2 * layer_s / 3,)) for layer in bare.layers
    )
    fields = {"update_s": _UPDATE_S, "overhead_s": _OVERHEAD_S, "step_correlation": case.correlation}
    return msgspec.structs.replace(bare, layers=layers, **fields)


def _plan(case: Case) -> Plan:
    return Plan(devices=case.devices, global_batch=case.devices, algorithm="halving-doubling", overlap="off")


def predicted_s(workload: Workload, case: Case) -> float:
    """Return the predicted waiting of a step; ``workload`` has the spread. The link costs nothing."""
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=math.inf)
    machine = Machine(name="free link", link=link, slow_devices=case.slow_devices)
    return price(scheduled(workload, machine, _plan(case)), machine).prediction.waiting_for_slowest_s


STUDY: Study[Case] = Study(
    name="waiting",
    record=Record[Case],
    samples=("equal_s", "drawn_s", "predicted_s", "lateness_s"),
    task="dpsim.experiments.waiting:wait_on_ranks",
    pin=False,
)


def wait_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, list[float]]:
    """Return the samples of one ``Case``."""
    case = codec.decode(argument["case"], Case, "case")
    data, network = load_dataset("digits"), Network.parse(_LINK)
    replicas = []
    for spread in ((), quantiles(case.shape, case.deviation)):
        model = models.load(_MODEL, data.input_shape, data.classes).replica()
        workload = msgspec.structs.replace(workload_of(describe(model, _MODEL), case), step_spread=spread)
        slow = bool(spread) and comm.rank < len(case.slow_devices)
        own = workload.slowed(case.slow_devices[comm.rank]) if slow else workload
        replicas.append(EmulatedReplica(model, own, seed=0, rank=comm.rank))
    trainers = [Trainer(replica, data, _plan(case), comm, network) for replica in replicas]
    gc.collect()
    gc.freeze()
    late_s: list[float] = []

    def visit(index: int) -> list[float]:
        quiet_barrier(comm)
        replicas[index].begin_anew()
        ends_s = []
        for _ in range(WARM_UP_STEPS + _STEPS):
            ends_s.append(trainers[index].step().marks.end_s)
            late_s.extend(replicas[index].lateness_s)
        return step_times_s(comm.allgather(ends_s))

    stop = StopRule(least_rounds=case.rounds, most_rounds=case.rounds)
    samples = in_turns({0: lambda: visit(0), 1: lambda: visit(1)}, stop, comm=comm)
    for trainer in trainers:
        trainer.close()
    return {
        "equal_s": [*itertools.chain.from_iterable(samples[0])],
        "drawn_s": [*itertools.chain.from_iterable(samples[1])],
        "predicted_s": [predicted_s(workload, case)],
        "lateness_s": [statistics.median(late_s)],
    }
