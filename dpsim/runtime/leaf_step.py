"""The passes of a step over a rank's leaves: which operations each stands for, and where its results are added up."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from dpsim.kernels.allreduce.reference import rounded
from dpsim.kernels.rounding import round_array, round_sum
from dpsim.plan import Plan
from dpsim.replica import Array, Batch, BatchNormReplica, BatchSums, Capabilities, OrderedSum, Replica, Rounding, Slot
from dpsim.runtime.arena import Arena
from dpsim.runtime.micro_batches import MicroBatch, plan_micro_batches, slot_sums
from dpsim.runtime.program import StepProgram


class Pass(NamedTuple):
    """A forward and backward pass over one micro-batch, and the operations that the replica announces in it.

    A rank may run more micro-batches than the schedule lists (leaves). Extra ones map to micro-batch 0; only the last
    of them ``releases`` its collectives. ``adds``: its gradients are rounded or added to others as they become ready.
    ``onto``: the replica adds them to the sum before, which is what ``micro_batch`` says then.
    """

    micro_batch: MicroBatch
    forward: tuple[int, ...]
    recompute: tuple[int, ...]
    loss: int
    backward: tuple[int, ...]
    releases: bool
    adds: bool
    onto: bool


class LeafStep:
    """A rank's passes, the memory of their gradients, and the sums of what they return.

    The first ``held`` slots of the arena belong to this rank. A replica that is no ``LeafReplica`` computes one leaf a
    pass. ``rounding`` applies to every leaf's gradients and to every sum of two.
    """

    def __init__(
        self,
        replica: Replica,
        arena: Arena,
        plan: Plan,
        rank: int,
        held: int,
        rounding: Rounding | None,
        program: StepProgram,
    ) -> None:
        able = Capabilities.of(replica)
        self._replica, self._leaf_replica = replica, able.leaf
        self._adding = able.adding if rounding is None else None
        self._micro_batches = plan_micro_batches(plan, rank, takes_leaves=self._leaf_replica is not None)
        self._parameters = arena.parameter_views()
        self._slots = [arena.gradient_views(slot) for slot in arena.slots[:held]]
        self._rounding, self._xp = rounding, arena.memory.xp
        self.passes = self._passes(program, plan)
        partial = [arena.zeros() for _ in range(max(each.micro_batch.depth for each in self.passes))]
        self.partial_sum_bytes = sum(flat.nbytes for flat in partial)
        """The memory of sums of some micro-batches that are still to be added to others."""
        self._partial = [arena.gradient_views(flat) for flat in partial]
        self._normalising: BatchNormReplica | None = None
        self._statistics: list[list[Array]] = []
        self._total: Array | None = None
        if self._leaf_replica is not None:
            self._leaf_replica.train_in_leaves(plan.leaves > 0, rounding)
        self._bound: Pass | None = None
        self.bind(self.passes[0])

    def _passes(self, program: StepProgram, plan: Plan) -> tuple[Pass, ...]:
        passes = []
        surplus = len(self._micro_batches) - plan.accumulate
        for number, micro_batch in enumerate(self._micro_batches):
            scheduled = max(0, number - surplus)
            onto = self._adding is not None and micro_batch.merges > 0
            if onto:
                micro_batch = replace(micro_batch, depth=micro_batch.depth - 1, merges=micro_batch.merges - 1)
            passes.append(
                Pass(
                    micro_batch,
                    program.forward[scheduled],
                    program.recompute[scheduled],
                    program.loss[scheduled],
                    program.backward[scheduled],
                    releases=plan.data_devices > 1 and number >= surplus,
                    adds=bool(micro_batch.merges) or self._rounding is not None,
                    onto=onto,
                )
            )
        return tuple(passes)

    def part(self, micro_batch: MicroBatch, share: Batch) -> Batch:
        """Return what a pass computes of this rank's share."""
        edges = share.leaves[micro_batch.first : micro_batch.stop + 1]
        low, high = edges[0], edges[-1]
        return Batch(
            x=share.x[low:high],
            labels=share.labels[low:high],
            leaves=tuple(edge - low for edge in edges),
            seed=share.seed,
            step=share.step,
            first_sample=share.first_sample + low,
        )

    def bind(self, each: Pass) -> None:
        """Give the replica the memory for the gradients of a pass."""
        if each is self._bound:
            return
        self._bound, micro_batch = each, each.micro_batch
        first = self._memory(micro_batch.slot, micro_batch.depth)
        if self._leaf_replica is not None and len(micro_batch.edges) > 1:
            extra = zip(micro_batch.edges[1:], self._slots[1:], strict=True)
            self._leaf_replica.bind(self._parameters, first, [Slot(edge, gradients) for edge, gradients in extra])
        else:
            self._replica.bind(self._parameters, first)
        if self._adding is not None and each.onto:
            self._adding.add_gradients()

    def bind_again(self) -> None:
        """Give the replica its memory back, after somebody else has bound it."""
        self._bound = None
        self.bind(self.passes[0])

    def add_up(self, micro_batch: MicroBatch, names: Sequence[str]) -> None:
        """Add a micro-batch's gradients of these tensors to the partial sums that it completes."""
        to = self._rounding
        if to is not None and self._leaf_replica is None:
            leaf_gradients = self._memory(micro_batch.slot, micro_batch.depth)
            for name in names:
                round_in_place(leaf_gradients[name], to, self._xp)
        for depth in range(micro_batch.depth, micro_batch.depth - micro_batch.merges, -1):
            target, last = self._memory(micro_batch.slot, depth - 1), self._memory(micro_batch.slot, depth)
            for name in names:
                if to is None:
                    target[name] += last[name]
                else:
                    add_rounded(target[name], last[name], to, self._xp)

    def _memory(self, slot: int, depth: int) -> dict[str, Array]:
        return self._slots[slot] if depth == 0 else self._partial[depth - 1]

    def total(self, parts: Sequence[BatchSums], samples: int) -> BatchSums:
        """Return the sums of a step from those of each pass: losses along the tree of their slots."""
        losses = slot_sums(self._micro_batches, [sums.slot_losses or (sums.loss,) for sums in parts], operator.add)
        correct = sum(sums.correct for sums in parts)
        return BatchSums(loss=sum(losses), correct=correct, samples=samples, slot_losses=tuple(losses))

    def no_sums(self, micro_batch: MicroBatch, samples: int) -> BatchSums:
        """Return the sums of a pass of which another rank knows the loss."""
        return BatchSums(loss=0.0, correct=0, samples=samples, slot_losses=(0.0,) * len(micro_batch.edges))

    def normalise(self, replica: BatchNormReplica, mode: str, add: OrderedSum) -> None:
        """Let batch norm take its statistics as ``mode`` says; those of leaves are added by ``add``, once a step."""
        replica.normalise_batches(mode, add)
        if mode == "leaf":
            self._normalising, self._add = replica, add

    def take_statistics(self) -> None:
        """Keep the statistics of leaves of the pass that the replica has just computed."""
        if self._normalising is not None:
            self._statistics.append(self._normalising.leaf_statistics())

    def add_statistics(self) -> None:
        """Add the statistics of all passes over the ranks, once a step; a device is only asked to. Collective."""
        if self._normalising is not None and self._total is None:
            self._total = self._add(slot_sums(self._micro_batches, self._statistics, operator.add))
            self._statistics = []

    def update_statistics(self) -> None:
        """Update the replica's running statistics, which takes the sum of ``add_statistics``."""
        self.add_statistics()
        if self._normalising is not None and self._total is not None:
            self._normalising.update_statistics(self._total)
            self._total = None


def round_in_place(gradients: Array, to: Rounding, xp: Any) -> None:
    """Round gradients; ``xp`` is the module of the arrays."""
    if xp is np:
        round_array(gradients, *to, gradients)
    else:
        gradients[...] = rounded(gradients, *to, xp)


def add_rounded(target: Array, last: Array, to: Rounding, xp: Any) -> None:
    """Compute target += last, rounded; ``xp`` is the module of the arrays."""
    if xp is np:
        round_sum(target, last, *to, target)
    else:
        target[...] = rounded(target + last, *to, xp)
