"""What messages between rank classes cost on a Machine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim.collective import FLAT, Layout
from dpsim.machine import Machine
from dpsim.model.cost import send_curve
from dpsim.model.curve import at
from dpsim.plan import Plan
from dpsim.schedule import SEND_EVENT, Schedule

Floats = NDArray[np.float64]


class Messages(NamedTuple):
    """Of each operation: the ``seconds`` that its message takes (0: it sends none), and whether the receiver copies it.

    ``extrapolated``: whether a message is of a size outside what the machine was measured on.
    """

    seconds: Floats
    copied: NDArray[np.bool_]
    extrapolated: bool


NO_MESSAGES = Messages(np.zeros(0), np.zeros(0, np.bool_), extrapolated=False)


def messages_of(machine: Machine, schedule: Schedule) -> Messages:
    """The messages of a schedule of several classes.

    A rank copies what it receives from a rank of its node where dpsim measured the machine (``cores`` is known). Ranks
    of a node that send to another one at once share its link.
    """
    seconds, copied, extrapolated = np.zeros(len(schedule.kind)), np.zeros(len(schedule.kind), np.bool_), False
    for send in np.flatnonzero(schedule.kind == SEND_EVENT).tolist():
        classes = schedule.rank_class[[send, schedule.peer[send]]].tolist()
        senders = _senders(schedule.plan, *classes)
        across = senders > 0
        curve, size = send_curve(machine, _pair_layout(schedule.plan, across=across)), float(schedule.size_bytes[send])
        seconds[send] = at(curve.points, 1, size * max(senders, 1))
        copied[send] = not (across or machine.emulated_network) and machine.cores > 0
        extrapolated |= not curve.first_bytes <= size <= curve.last_bytes
    return Messages(seconds, copied, extrapolated)


def _senders(plan: Plan, sender: int, receiver: int) -> int:
    """How many ranks of a node send to another one when each of a stage sends to its peer; 0 in a flat layout."""
    if not plan.layout:
        return 0
    of_a_node = plan.devices_a_node
    stage, of_stage = sender // plan.parallelism.parts, plan.data_devices * plan.parallelism.parts
    own, apart = (
        np.arange(stage * of_stage, (stage + 1) * of_stage),
        plan.rank_of(receiver, 0) - plan.rank_of(sender, 0),
    )
    leaving = own[own // of_a_node != (own + apart) // of_a_node]
    return int(np.bincount(leaving // of_a_node).max()) if len(leaving) else 0


def _pair_layout(plan: Plan, *, across: bool) -> Layout:
    return FLAT if not plan.layout else Layout.of(2, 1) if across else Layout.of(1, 2)
