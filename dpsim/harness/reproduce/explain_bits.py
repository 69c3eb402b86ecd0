"""Which plans of a reproduction have the same bits, said before any rank starts: by the law of bits, then by values."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dpsim.comm.sum_orders import unseen_library
from dpsim.data import load_dataset
from dpsim.harness.reproduce.difference import first_difference
from dpsim.harness.reproduce.measure import possible
from dpsim.harness.reproduce.replay import trajectories
from dpsim.launch.rank_process import one_thread
from dpsim.lowering import lower
from dpsim.model.bits import letter, plan_bits
from dpsim.model.bits_words import why_by_values, why_different, why_same
from dpsim.progress import Progress
from dpsim.records.reproduce import Reproduction, Trajectory
from dpsim.runtime.describe import describe
from dpsim.study.runners.digest import replica


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Whether two plans have the same bits (None: not known), or the first step and tensor that differ; and why."""

    same: bool | None
    why: str
    step: int | None = None
    tensor: str = ""

    @property
    def verdict(self) -> str:
        """``same bits``, ``differ from step 1 on, first in dense2.bias``, or ``not known``."""
        if self.same is None:
            return "not known"
        return "same bits" if self.same else f"differ from step {self.step} on, first in {self.tensor}"


class ExplainedBits:
    """The bits of every plan of a reproduction. ``letters``: plans with equal ones have equal bits in all steps.

    ``replayed`` are the first steps of the first plan of each law; none where the law says that all are the same.
    """

    def __init__(self, reproduction: Reproduction, progress: Progress) -> None:
        self.steps, self.plans = reproduction.steps, possible(reproduction)
        dataset = load_dataset(reproduction.dataset, reproduction.seed)
        workload = describe(replica(reproduction, dataset), "model")
        self._bits = [plan_bits(lower(workload, plan)) for plan in self.plans]
        self._laws: list[int] = []
        """The number of the first plan with the same bits by the law."""
        for number, bits in enumerate(self._bits):
            self._laws.append(next((law for law in self._laws if bits.same(self._bits[law])), number))
        self._unknown = [unseen_library(plan.algorithm, plan.data_devices) for plan in self.plans]
        first = [law for law in dict.fromkeys(self._laws) if not self._unknown[law]]
        self._replayed: dict[int, Trajectory] = {}
        if len(first) > 1:
            with one_thread():
                replayed = trajectories(reproduction, [self.plans[law] for law in first], progress)
            self._replayed = dict(zip(first, replayed, strict=True))
        outcomes = [self._replayed.get(law, law) for law in self._laws]
        distinct = [each for number, each in enumerate(outcomes) if each not in outcomes[:number]]
        self.letters = [letter(distinct.index(each)) for each in outcomes]

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
        laws = self._laws[number], self._laws[other]
        if laws[0] == laws[1]:
            return Comparison(same=True, why=why_same(here, there))
        if self._unknown[number] or self._unknown[other]:
            return Comparison(same=None, why="nobody has seen in which order this MPI library's own allreduce adds")
        difference = _first(*(self._replayed[law] for law in laws))
        if difference is None:
            return Comparison(same=True, why=why_by_values(here, there, self.steps))
        step, tensor = difference
        return Comparison(same=False, why=why_different(here, there, tensor), step=step, tensor=tensor)

    def pairs(self) -> list[tuple[int, int]]:
        """Return the first plans of every two letters, those of which the other is a reference first."""
        first = [self.letters.index(each) for each in dict.fromkeys(self.letters)]
        every = [(number, other) for position, other in enumerate(first) for number in first[position + 1 :]]
        return sorted(every, key=lambda pair: pair[1] != self.reference(pair[0]))

    def alike(self, letter: str) -> list[tuple[int, int]]:
        """Return plans of one letter with the first of it: one for each law, besides the first plan itself."""
        plans = [number for number, each in enumerate(self.letters) if each == letter]
        other_laws = {self._laws[number]: number for number in reversed(plans[1:])}
        return [(number, plans[0]) for number in sorted(other_laws.values())]


def _first(here: Trajectory, there: Trajectory) -> tuple[int, str] | None:
    """Return the first step and tensor that differ, in the steps that both have."""
    steps = min(len(here.steps), len(there.steps))
    difference = first_difference(_up_to(there, steps), _up_to(here, steps))
    return None if difference is None else (difference.step, difference.tensor)


def _up_to(trajectory: Trajectory, steps: int) -> Trajectory:
    return msgspec.structs.replace(trajectory, losses=trajectory.losses[:steps], steps=trajectory.steps[:steps])
