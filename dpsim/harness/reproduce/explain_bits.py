"""Which plans of a reproduction have the same bits, said before any rank starts: by the law of bits, then by values."""

from __future__ import annotations

import msgspec

from dpsim.comm.sum_orders import unseen_library
from dpsim.data import load_dataset
from dpsim.harness.reproduce.difference import first_difference
from dpsim.harness.reproduce.lettered import Comparison, LetteredRun
from dpsim.harness.reproduce.measure import possible
from dpsim.harness.reproduce.replay import trajectories
from dpsim.launch.rank_process import one_thread
from dpsim.lowering import lower
from dpsim.model.bits import letter, plan_bits
from dpsim.model.bits_words import why_by_values, why_different, why_same
from dpsim.progress import Progress
from dpsim.records.reproduce import Reproduction, Trajectory, plan_name
from dpsim.report.reproduce import configuration
from dpsim.runtime.describe import describe
from dpsim.study.runners.digest import replica


class ExplainedBits:
    """The bits of every plan of a reproduction, as ``dpsim.harness.reproduce.lettered.LetteredRuns``.

    Where the law does not give two of them the same bits, they are trained in this process until a tensor differs.
    """

    against = "against 1 device"

    def __init__(self, reproduction: Reproduction, progress: Progress) -> None:
        with one_thread():  # as ranks compute, and before a model of PyTorch is loaded
            self._explain(reproduction, progress)

    def _explain(self, reproduction: Reproduction, progress: Progress) -> None:
        self.steps, self.plans = reproduction.steps, possible(reproduction)
        self.title = f"bits in {self.steps} steps"
        dataset = load_dataset(reproduction.dataset, reproduction.seed)
        workload = describe(replica(reproduction, dataset), "model")
        self._bits = [plan_bits(lower(workload, plan)) for plan in self.plans]
        laws: list[int] = []
        for number, bits in enumerate(self._bits):
            laws.append(next((law for law in laws if bits.same(self._bits[law])), number))
        self._unknown = [unseen_library(plan.algorithm, plan.data_devices) for plan in self.plans]
        first = [law for law in dict.fromkeys(laws) if not self._unknown[law]]
        self._replayed: dict[int, Trajectory] = {}
        if len(first) > 1:
            replayed = trajectories(reproduction, [self.plans[law] for law in first], progress)
            self._replayed = dict(zip(first, replayed, strict=True))
        outcomes = [self._replayed.get(law, law) for law in laws]
        distinct = [each for number, each in enumerate(outcomes) if each not in outcomes[:number]]
        several_modes = len(reproduction.batch_norms) > 1
        self.runs = [
            LetteredRun(
                name=plan_name(plan),
                section=f"batch norm {plan.batch_norm}" if several_modes else "",
                settings=configuration(plan),
                letter=letter(distinct.index(outcome)),
                law=law,
            )
            for plan, outcome, law in zip(self.plans, outcomes, laws, strict=True)
        ]

    def reference(self, number: int) -> int:
        """Return the plan that a reproduction compares a plan with: one device in the same mode."""
        mode = self.plans[number].batch_norm
        return next(
            other
            for other, plan in enumerate(self.plans)
            if (plan.devices, plan.accumulate, plan.batch_norm) == (1, 1, mode)
        )

    def compare(self, number: int, other: int) -> Comparison:
        """Compare a plan with another one."""
        here, there = self._bits[number], self._bits[other]
        laws = self.runs[number].law, self.runs[other].law
        if laws[0] == laws[1]:
            return Comparison(same=True, why=why_same(here, there))
        if self._unknown[number] or self._unknown[other]:
            return Comparison(same=None, why="nobody has seen in which order this MPI library's own allreduce adds")
        difference = _first(*(self._replayed[law] for law in laws))
        if difference is None:
            return Comparison(same=True, why=why_by_values(here, there, self.steps))
        step, tensor = difference
        return Comparison(same=False, why=why_different(here, there, tensor), step=step, tensor=tensor)


def _first(here: Trajectory, there: Trajectory) -> tuple[int, str] | None:
    """Return the first step and tensor that differ, in the steps that both have."""
    steps = min(len(here.steps), len(there.steps))
    difference = first_difference(_up_to(there, steps), _up_to(here, steps))
    return None if difference is None else (difference.step, difference.tensor)


def _up_to(trajectory: Trajectory, steps: int) -> Trajectory:
    return msgspec.structs.replace(trajectory, losses=trajectory.losses[:steps], steps=trajectory.steps[:steps])
