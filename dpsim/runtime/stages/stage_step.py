"""A stage's part of a step: forwards, backwards and messages of the micro-batches in flight, in the program's order."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from dpsim.comm.transport import Array, Request, Transport, wait
from dpsim.replica import (
    EVALUATION_SAMPLES,
    Batch,
    BatchSums,
    DeferredSums,
    EmulatedCompute,
    StagedReplica,
    StageEvents,
)
from dpsim.runtime.leaf_step import LeafStep, Pass
from dpsim.runtime.program import Action, StepProgram
from dpsim.runtime.rank_status import RankStatus
from dpsim.runtime.step_clock import StepClock
from dpsim.schedule import (
    BACKWARD_EVENT,
    FORWARD_EVENT,
    LOSS_EVENT,
    RECEIVE_EVENT,
    RECOMPUTE_EVENT,
    SEND_EVENT,
    Schedule,
)

INPUT, OUTPUT = "input", "output"
INPUT_GRADIENT, OUTPUT_GRADIENT = "gradient of the input", "gradient of the output"


class StageStep:
    """A rank's stage: computes it with ``replica``, exchanges activations and gradients with neighbouring stages.

    ``world`` carries the messages: a rank talks to those that have its place and its part in other stages. Each of
    the micro-batches that are in flight in ``schedule`` has memory of its own. ``enter`` is called before anything of a
    micro-batch is announced.
    """

    def __init__(
        self,
        replica: StagedReplica,
        program: StepProgram,
        leaves: LeafStep,
        world: Transport,
        schedule: Schedule,
        clock: StepClock,
        status: RankStatus,
        emulated: EmulatedCompute | None,
    ) -> None:
        self._replica, self._program, self._leaves = replica, program, leaves
        plan = self._plan = schedule.plan
        self._world, self._in_flight = world, schedule.stashes[schedule.class_of(world.rank)]
        self._clock, self._status, self._emulated = clock, status, emulated
        self._class, self._place = plan.class_of(world.rank), plan.place_of(world.rank)
        ends = [action for action in program.actions if action.kind in (RECEIVE_EVENT, SEND_EVENT)]
        self._before = next((each for each in ends if each.peer_class < self._class), None)
        self._behind = next((each for each in ends if each.peer_class > self._class), None)
        self._arrays: dict[tuple[str, int], Array] = {}
        self._memory: dict[tuple[str, int], Array] = {}
        self._sending: dict[tuple[str, int], Request] = {}

    @property
    def size_bytes(self) -> int:
        """The memory of what is received."""
        return sum(flat.nbytes for flat in self._memory.values())

    def run(self, share: Batch, enter: Callable[[Pass], None], events: StageEvents) -> list[BatchSums | DeferredSums]:
        """Compute the stage's part of a step up to the update; the sums of each micro-batch, zeros without the loss."""
        leaves, replica = self._leaves, self._replica
        batches = [leaves.part(each.micro_batch, share) for each in leaves.passes]
        sums: list[BatchSums | DeferredSums] = []
        for each, batch in zip(leaves.passes, batches, strict=True):
            sums.append(leaves.no_sums(each.micro_batch, len(batch.labels)))
        for action in self._program.actions:
            number = action.micro_batch
            slot, batch, each = number % self._in_flight, batches[number], leaves.passes[number]
            if action.kind == RECEIVE_EVENT:
                self._receive(action, slot, len(batch.labels))
                continue
            if action.kind == SEND_EVENT:
                self._send(action, slot)
                continue
            enter(each)
            if action.kind == FORWARD_EVENT:
                self._wait_until_sent(OUTPUT, slot)
                self._arrays[OUTPUT, slot] = replica.forward_stage(slot, batch, self._arrays.get((INPUT, slot)), events)
                leaves.take_statistics()
            elif action.kind == LOSS_EVENT:
                sums[number] = replica.loss_stage(slot, batch, events)
            elif action.kind == RECOMPUTE_EVENT:
                replica.recompute_stage(slot, batch, events)
            elif action.kind == BACKWARD_EVENT:
                self._wait_until_sent(INPUT_GRADIENT, slot)
                leaves.bind(each)
                gradient = self._arrays.get((OUTPUT_GRADIENT, 0))
                returned = replica.backward_stage(slot, batch, gradient, events)
                if returned is not None:
                    self._arrays[INPUT_GRADIENT, slot] = returned
        return sums

    def evaluate(self, x: Array, labels: Array) -> BatchSums:
        """Return the sums of an evaluation in the last stage, zeros in the others; all call it together."""
        loss, correct = 0.0, 0
        for start in range(0, len(labels), EVALUATION_SAMPLES):
            part = slice(start, start + EVALUATION_SAMPLES)
            values = x[part]
            if self._before is not None:
                shape, dtype = self._replica.boundary(self._before.layer)
                values = self._take(INPUT, 0, (len(values), *shape), dtype)
                wait(self._world, [self._world.receive(_flat(values), self._rank_of(self._before))])
            values = self._replica.evaluate_stage(values)
            if self._behind is not None:
                wait(self._world, [self._world.send(_flat(values), self._rank_of(self._behind))])
                continue
            sums = self._replica.evaluate_logits(values, labels[part])
            loss, correct = loss + sums.loss, correct + sums.correct
        return BatchSums(loss=loss, correct=correct, samples=len(labels))

    def poll(self) -> None:
        """Let messages under way go on."""
        for key in [key for key, sending in self._sending.items() if sending.done()]:
            del self._sending[key]

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for key in list(self._sending):
            self._wait_until_sent(*key)

    def _send(self, action: Action, slot: int) -> None:
        what = OUTPUT if action.peer_class > self._class else INPUT_GRADIENT
        self._sending[what, slot] = self._world.send(_flat(self._arrays[what, slot]), self._rank_of(action))

    def _receive(self, action: Action, slot: int, samples: int) -> None:
        """Wait for what the stage before hands on, which backward needs too, or for the gradient of one's output."""
        forward = action.peer_class < self._class
        what, (shape, dtype) = INPUT if forward else OUTPUT_GRADIENT, self._replica.boundary(action.layer)
        data = self._take(what, slot if forward else 0, (samples, *shape), dtype)
        since = self._clock.timestamp()
        self._status.waits()
        wait(self._world, [self._world.receive(_flat(data), self._rank_of(action))])
        self._status.computes()
        end = self._clock.paused(since, data.nbytes, RECEIVE_EVENT)
        if self._emulated is not None:
            self._emulated.resumes_at(end)

    def _take(self, what: str, slot: int, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return memory for an array, and remember that it is what its name says."""
        size = math.prod(shape)
        flat = self._memory.get((what, slot))
        if flat is None or len(flat) < size:
            flat = self._memory[what, slot] = np.empty(size, dtype)
        array = self._arrays[what, slot] = flat[:size].reshape(shape)
        return array

    def _rank_of(self, message: Action) -> int:
        return self._plan.rank_of(message.peer_class, self._place)

    def _wait_until_sent(self, what: str, slot: int) -> None:
        """Wait until all is sent, since what is being sent must not be overwritten."""
        sending = self._sending.pop((what, slot), None)
        if sending is not None:
            wait(self._world, [sending])


def _flat(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1)
