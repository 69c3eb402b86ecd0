"""What emulated computation changes: real steps, and the same replayed. ``make accuracy`` measures it.

Two ranks train for real over an emulated link. Then they wait for exactly the times that their own layers just took,
while gradients, allreduces and updates stay real. Visits of both take turns, so that a machine that changes its speed
changes both alike.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim import codec
from dpsim.codec import Noun
from dpsim.comm.group import quiet_barrier
from dpsim.data import load_dataset
from dpsim.experiments.cases import Measured, Record, Study
from dpsim.machine import Network
from dpsim.plan import Overlap, Plan
from dpsim.progress import Progress
from dpsim.runtime.describe import describe
from dpsim.runtime.emulated import EmulatedReplica
from dpsim.runtime.recorder import exposed_s
from dpsim.runtime.step import StepOutcome
from dpsim.runtime.trainer import Trainer
from dpsim.study import models
from dpsim.study.loop import StopRule, in_turns
from dpsim.study.runners.profile import computing_times
from dpsim.study.steps import WARM_UP_STEPS, step_times_s
from dpsim.workload import Workload

_SAMPLES = ("real_s", "replayed_s", "real_exposed_s", "replayed_exposed_s")
_STEPS = 8
_LINK = "paced:1ms,200mbit"


class Case(Noun, frozen=True):
    """A model that is trained on two ranks; ``fusion_threshold_bytes`` as in ``Plan``."""

    model: str
    local_batch: int
    overlap: Overlap
    fusion_threshold_bytes: float
    network: str = _LINK
    rounds: int = 22

    @property
    def devices(self) -> int:
        return 2

    @property
    def title(self) -> str:
        return f"{self.model}, overlap {self.overlap}, threshold {self.fusion_threshold_bytes:g}"


Replayed = Measured[Case]
"""Seconds of each real step, of the step replayed from it, and the exposed communication of both: ``_SAMPLES``."""


def change(of: Replayed) -> float:
    """Return median replayed step / median real step - 1."""
    return float(np.median(of.samples["replayed_s"]) / np.median(of.samples["real_s"])) - 1


_OVERLAPS: tuple[Overlap, ...] = ("off", "thread", "poll")
CASES = tuple(
    Case(model="cnn", local_batch=32, overlap=overlap, fusion_threshold_bytes=threshold)
    for overlap, threshold in itertools.product(_OVERLAPS, (65536.0, float("inf")))
)


STUDY: Study[Case] = Study(
    name="emulation",
    record=Record[Case],
    samples=_SAMPLES,
    task="dpsim.experiments.emulation:replay_on_ranks",
)


def replay_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, list[float]]:
    """Return the samples of one ``Case``, on rank 0."""
    case = codec.decode(argument["case"], Case, "case")
    data = load_dataset("digits")
    plan = Plan(
        devices=comm.size,
        global_batch=case.local_batch * comm.size,
        algorithm="ring",
        overlap=case.overlap,
        fusion_threshold_bytes=case.fusion_threshold_bytes,
    )
    network = Network.parse(case.network)
    trained, waiting = (models.load(case.model, data.input_shape, data.classes).replica() for _ in range(2))
    bare = msgspec.structs.replace(describe(trained, case.model), local_batches=(case.local_batch,))
    real = Trainer(trained, data, plan, comm, network)
    replica = EmulatedReplica(waiting, bare, seed=0, rank=comm.rank)
    emulated = Trainer(replica, data, plan, comm, network)
    gc.collect()
    gc.freeze()

    def visit() -> list[Any]:
        quiet_barrier(comm)
        outcomes = [real.step() for _ in range(_STEPS)]
        times = [_times(*pair, real) for pair in itertools.pairwise(outcomes)]
        quiet_barrier(comm)
        replica.begin_anew()
        again: list[StepOutcome] = []
        for row in (times[0], *times):
            replica.replay(_workload(bare, row))
            again.append(emulated.step())
        return [[(outcome.marks.end_s, exposed_s(outcome.marks)) for outcome in steps] for steps in (outcomes, again)]

    counted = case.rounds - WARM_UP_STEPS
    stop = StopRule(least_rounds=counted, most_rounds=counted)
    seen = comm.gather(in_turns({case: visit}, stop, warm_up=WARM_UP_STEPS, comm=comm)[case])
    real.close()
    emulated.close()
    if seen is None:
        return {}
    taken_s, waited_s = np.moveaxis(np.array(seen), -1, 0)  # [rank, visit, real or replayed, step]
    samples: dict[str, list[float]] = {}
    for index, name in enumerate(("real", "replayed")):
        visits = (step_times_s(ends_s) for ends_s in taken_s[:, :, index].swapaxes(0, 1))
        samples[f"{name}_s"] = [*itertools.chain.from_iterable(visits)]
        samples[f"{name}_exposed_s"] = waited_s[:, :, index, WARM_UP_STEPS:].min(axis=0).ravel().tolist()
    return samples


def _times(before: StepOutcome, outcome: StepOutcome, trainer: Trainer) -> NDArray[np.float64]:
    """Return ``computing_times`` of a step, without the communication that the rank did or waited for."""
    row = computing_times(before.marks.end_s, outcome.marks, trainer.schedule)
    row[-1] -= exposed_s(outcome.marks)
    return np.maximum(row, 0.0)


def _workload(bare: Workload, row: NDArray[np.float64]) -> Workload:
    """Return the workload whose layers take the computing times of one step."""
    forward, backward, ready = row[:-2].reshape(3, -1)
    layers = tuple(
        msgspec.structs.replace(
            layer,
            forward_s=(float(forward[index]),),
            backward_s=(float(backward[index]),),
            gradient_ready_s=(float(min(ready[index], backward[index])),),
        )
        for index, layer in enumerate(bare.layers)
    )
    return msgspec.structs.replace(bare, layers=layers, update_s=float(row[-2]), overhead_s=float(row[-1]))
