"""A rank class's part of a Schedule as tuples: what a rank looks up in a step, without NumPy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dpsim.errors import ConfigError
from dpsim.schedule import (
    ALL_GATHER_EVENT,
    ALLREDUCE_EVENT,
    BACKWARD_EVENT,
    BROADCAST_EVENT,
    FORWARD_EVENT,
    KINDS,
    LOSS_EVENT,
    OTHER_EVENT,
    OVERHEAD_EVENT,
    RECEIVE_EVENT,
    RECOMPUTE_EVENT,
    REDUCE_SCATTER_EVENT,
    SEND_EVENT,
    SYNCHRONISE_EVENT,
    UPDATE_EVENT,
    WAIT_EVENT,
    Schedule,
)

_GATHERS = (ALL_GATHER_EVENT, BROADCAST_EVENT)
_QUEUED = (ALLREDUCE_EVENT, REDUCE_SCATTER_EVENT, *_GATHERS)
_OF_LAYERS = (FORWARD_EVENT, RECOMPUTE_EVENT, BACKWARD_EVENT)
_ANNOUNCED = (OVERHEAD_EVENT, *_OF_LAYERS, LOSS_EVENT)
_MESSAGES = (SEND_EVENT, RECEIVE_EVENT)


class QueuedCollective(NamedTuple):
    """A collective of a bucket: its kind (of ``KINDS``), the bucket, and the number of operations that it waits for.

    A broadcast is of one ``tensor`` in the bucket.
    """

    kind: int
    bucket: int
    waits: int
    tensor: int = -1


class Action(NamedTuple):
    """One action of a stage: neighbouring operations of one kind and micro-batch.

    ``peer_class`` is the class of the other end of a message, and ``layer`` the one whose output travels, or its
    gradient; of anything else the first layer.
    """

    kind: int
    micro_batch: int
    peer_class: int
    layer: int


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """The operations that are announced, and those that they release, by their numbers in the schedule.

    ``forward``, ``recompute``, ``loss`` and ``backward`` give the operation of a micro-batch (and a layer; -1 where the
    class does not compute it). ``queue`` are the collectives of buckets in the order in which they are sent, and
    ``releases[operation]`` the positions in the queue that wait for that operation: a sum until the gradients of a
    backward are final, and (``releases_at_end``) an all-gather until it has read its parameters. The first
    ``before_update`` of the queue begin before the update. Before what follows ``operation`` may begin, the first
    ``needs_after[operation]`` must have ended. ``layers`` are the layers of the class; ``actions`` what a stage does up
    to the update, if stages send each other messages; ``agreement_bytes`` what the ranks send to agree before it.
    """

    overhead: int
    update: int
    forward: tuple[tuple[int, ...], ...]
    recompute: tuple[tuple[int, ...], ...]
    loss: tuple[int, ...]
    backward: tuple[tuple[int, ...], ...]
    queue: tuple[QueuedCollective, ...]
    before_update: int
    releases: tuple[tuple[int, ...], ...]
    releases_at_end: tuple[tuple[int, ...], ...]
    needs_after: tuple[int, ...]
    layers: tuple[int, ...]
    actions: tuple[Action, ...]
    agreement_bytes: int
    names: tuple[str, ...]

    @property
    def waits_for_collectives(self) -> bool:
        """Whether any computation before the update waits for a collective."""
        return any(self.needs_after)


def compiled(schedule: Schedule, rank: int = 0) -> StepProgram:
    """Return the program of a rank. Raises ``ConfigError`` for operations that the runtime does not execute."""
    kinds = schedule.kind.tolist()
    if others := {*kinds} & {WAIT_EVENT, OTHER_EVENT}:
        raise ConfigError(
            f"a schedule with operations of kind {', '.join(KINDS[kind] for kind in sorted(others))}",
            allowed="computations, collectives, messages and updates",
        )
    rank_class = schedule.class_of(rank)
    own = np.flatnonzero(schedule.rank_class == rank_class).tolist()
    updates = [operation for operation in own if kinds[operation] == UPDATE_EVENT]
    queued = [operation for operation in own if kinds[operation] in _QUEUED]
    synchronised = [operation for operation in own if kinds[operation] == SYNCHRONISE_EVENT]
    if len(updates) != 1 or {kinds[operation] for operation in own[own.index(updates[0]) + 1 :]} - {*_GATHERS}:
        raise ConfigError(
            "a schedule that does not end with the update",
            allowed="one update, after everything else but the all-gathers and broadcasts of the parameters",
        )
    (update,) = updates
    if any(update not in schedule.dependencies(gather) for gather in queued if gather > update):
        raise ConfigError("an all-gather of parameters that does not wait for their update", allowed="one that does")
    computed = [operation for operation in own if kinds[operation] in _ANNOUNCED]
    rows, layers = _computations(schedule, computed)
    position = {operation: number for number, operation in enumerate(queued)}
    queue, releases, at_end = _releases(schedule, queued)
    needs_after = [0] * len(kinds)
    for before, operation in itertools.pairwise(computed):
        awaited = [position[each] for each in schedule.dependencies(operation).tolist() if each in position]
        needs_after[before] = max(awaited, default=-1) + 1
    return StepProgram(
        overhead=rows[OVERHEAD_EVENT][0][0],
        update=update,
        forward=tuple(map(tuple, rows[FORWARD_EVENT])),
        recompute=tuple(map(tuple, rows[RECOMPUTE_EVENT])),
        loss=tuple(row[0] for row in rows[LOSS_EVENT]),
        backward=tuple(map(tuple, rows[BACKWARD_EVENT])),
        queue=tuple(queue),
        before_update=sum(collective < update for collective in queued),
        releases=tuple(map(tuple, releases)),
        releases_at_end=tuple(map(tuple, at_end)),
        needs_after=tuple(needs_after),
        layers=layers,
        actions=_actions(schedule, own) if SEND_EVENT in kinds else (),
        agreement_bytes=int(schedule.size_bytes[synchronised[-1]]) if synchronised else 0,
        names=tuple(schedule.operation_name(operation) for operation in range(len(kinds))),
    )


def _releases(schedule: Schedule, queued: list[int]) -> tuple[list[QueuedCollective], list[list[int]], list[list[int]]]:
    """Return the queue, and of each operation the positions in it that it releases when it is final, and at its end.

    Raises ``ConfigError`` for a collective that waits for what is announced by no layer.
    """
    kinds = schedule.kind.tolist()
    releases: list[list[int]] = [[] for _ in kinds]
    at_end: list[list[int]] = [[] for _ in kinds]
    queue, tensors = [], iter(schedule.broadcast_tensors)
    for number, collective in enumerate(queued):
        earlier = {*schedule.dependencies(collective).tolist()} - {*queued[:number]}
        if any(kinds[operation] not in (*_ANNOUNCED, UPDATE_EVENT) for operation in earlier):
            raise ConfigError(
                f"{schedule.operation_name(collective)} waits for what is announced by no layer",
                allowed="collectives that wait for computations, or for collectives before them",
            )
        tensor = next(tensors) if kinds[collective] == BROADCAST_EVENT else -1
        queue.append(QueuedCollective(kinds[collective], int(schedule.bucket[collective]), len(earlier), tensor))
        for operation in earlier:
            late = kinds[collective] == ALL_GATHER_EVENT and kinds[operation] == BACKWARD_EVENT
            (at_end if late else releases)[operation].append(number)
    return queue, releases, at_end


def _computations(schedule: Schedule, computed: list[int]) -> tuple[list[list[list[int]]], tuple[int, ...]]:
    """Return the operation of each kind, micro-batch and layer; the layers. Refuses what leaves one out."""
    operations = np.full((len(KINDS), schedule.plan.accumulate, len(schedule.workload.layers)), -1)
    for operation in computed:
        layer = max(int(schedule.layer[operation]), 0)
        operations[schedule.kind[operation], schedule.micro_batch[operation], layer] = operation
    own = np.flatnonzero((operations[FORWARD_EVENT] >= 0).any(axis=0)).tolist() or [0]
    layers, foreign = schedule.workload.layers, {*range(own[0], own[-1] + 1)} - {*own}
    of_layers = operations[[FORWARD_EVENT, BACKWARD_EVENT]][:, :, own]
    last = own[-1] + 1 == len(layers)
    in_blocks = all(layers[layer].column_block >= 0 for layer in foreign)
    lossless = last and operations[LOSS_EVENT, :, 0].min() < 0
    if operations[OVERHEAD_EVENT, 0, 0] < 0 or of_layers.min() < 0 or lossless or not in_blocks:
        raise ConfigError(
            "a schedule that leaves a computation out",
            allowed="the overhead, and in each micro-batch each layer forward and backward, and the loss",
        )
    return operations.tolist(), tuple(own)


def _actions(schedule: Schedule, own: list[int]) -> tuple[Action, ...]:
    actions: list[Action] = []
    for operation in own:
        kind, micro_batch = int(schedule.kind[operation]), int(schedule.micro_batch[operation])
        if kind not in (*_OF_LAYERS, LOSS_EVENT, *_MESSAGES):
            continue
        if actions and kind in _OF_LAYERS and (actions[-1].kind, actions[-1].micro_batch) == (kind, micro_batch):
            continue
        peer = int(schedule.peer[operation])
        other = int(schedule.rank_class[peer]) if peer >= 0 else -1
        actions.append(Action(kind, micro_batch, other, int(schedule.layer[operation])))
    return tuple(actions)
