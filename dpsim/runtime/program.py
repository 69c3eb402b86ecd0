"""A rank's part of a Schedule as tuples: what it looks up in a step, without NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpsim.errors import ConfigError
from dpsim.schedule import (
    ALLREDUCE_EVENT,
    BACKWARD_EVENT,
    COLLECTIVES,
    FORWARD_EVENT,
    KINDS,
    LOSS_EVENT,
    OVERHEAD_EVENT,
    REDUCE_SCATTER_EVENT,
    UPDATE_EVENT,
    Schedule,
)

_COMPUTATIONS = (OVERHEAD_EVENT, FORWARD_EVENT, LOSS_EVENT, BACKWARD_EVENT)


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """What is announced, and what that releases, as numbers of the schedule's operations.

    ``forward``, ``loss`` and ``backward`` give the operation of a micro-batch (and a layer). ``queue`` are the buckets
    of the gradient collectives in the order in which they are sent; ``waits`` is how many operations each of them
    waits for, and ``releases[operation]`` the positions in the queue that wait for that operation. ``adds_up`` is what
    they are as events (of ``KINDS``), and ``gathers`` are the buckets whose parameters are gathered after the update.
    """

    overhead: int
    update: int
    forward: tuple[tuple[int, ...], ...]
    loss: tuple[int, ...]
    backward: tuple[tuple[int, ...], ...]
    queue: tuple[int, ...]
    waits: tuple[int, ...]
    releases: tuple[tuple[int, ...], ...]
    adds_up: int
    gathers: tuple[int, ...]
    names: tuple[str, ...]


def compiled(schedule: Schedule) -> StepProgram:
    """The program of a rank. Raises ``ConfigError`` for operations that the runtime does not execute."""
    kinds = schedule.kind.tolist()
    if others := {*kinds} - {*_COMPUTATIONS, *COLLECTIVES, UPDATE_EVENT}:
        raise ConfigError(
            f"a schedule with operations of kind {', '.join(KINDS[kind] for kind in sorted(others))}",
            allowed="computations, collectives and updates",
        )
    gathers = schedule.parameter_collectives.tolist()
    update = len(kinds) - 1 - len(gathers)
    if kinds.count(UPDATE_EVENT) != 1 or kinds[update] != UPDATE_EVENT:
        raise ConfigError(
            "a schedule that does not end with the update",
            allowed="one update, after everything else but the all-gathers of the parameters",
        )
    if any(update not in schedule.dependencies(gather) for gather in gathers):
        raise ConfigError("an all-gather of parameters that does not wait for their update", allowed="one that does")
    layers, micro_batches = len(schedule.workload.layers), schedule.plan.accumulate
    operations = np.full((BACKWARD_EVENT + 1, micro_batches, layers), -1)
    for operation in np.flatnonzero(np.isin(kinds, _COMPUTATIONS)).tolist():
        layer = max(int(schedule.layer[operation]), 0)
        operations[kinds[operation], schedule.micro_batch[operation], layer] = operation
    rows: list[list[list[int]]] = operations.tolist()
    single = [rows[OVERHEAD_EVENT][0][0], *(row[0] for row in rows[LOSS_EVENT])]
    if min([*single, *map(min, rows[FORWARD_EVENT] + rows[BACKWARD_EVENT])]) < 0:
        raise ConfigError(
            "a schedule that leaves a computation out",
            allowed="the overhead, and in each micro-batch each layer forward and backward, and the loss",
        )
    collectives = schedule.gradient_collectives.tolist()
    releases: list[list[int]] = [[] for _ in kinds]
    waits = []
    for position, collective in enumerate(collectives):
        earlier = {*schedule.dependencies(collective).tolist()} - {*collectives[:position]}
        if any(kinds[operation] not in _COMPUTATIONS for operation in earlier):
            raise ConfigError(
                f"{schedule.operation_name(collective)} waits for what is announced by no layer",
                allowed="allreduces that wait for computations, or for allreduces before them",
            )
        waits.append(len(earlier))
        for operation in earlier:
            releases[operation].append(position)
    return StepProgram(
        overhead=rows[OVERHEAD_EVENT][0][0],
        update=update,
        forward=tuple(map(tuple, rows[FORWARD_EVENT])),
        loss=tuple(row[0] for row in rows[LOSS_EVENT]),
        backward=tuple(map(tuple, rows[BACKWARD_EVENT])),
        queue=tuple(schedule.bucket[collectives].tolist()),
        waits=tuple(waits),
        releases=tuple(map(tuple, releases)),
        adds_up=REDUCE_SCATTER_EVENT if schedule.sharded else ALLREDUCE_EVENT,
        gathers=tuple(schedule.bucket[gathers].tolist()),
        names=tuple(schedule.operation_name(operation) for operation in range(len(kinds))),
    )
