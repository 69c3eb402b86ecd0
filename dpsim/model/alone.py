"""A collective alone: what one costs with nothing else running, with its interval and what that rests on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dpsim.collective import Collective
from dpsim.machine import Machine
from dpsim.model.cells import cell_of
from dpsim.model.cost import cost, idle_curve
from dpsim.model.interval import of_collective_alone
from dpsim.model.message import message
from dpsim.model.step import scheduled
from dpsim.plan import Plan

AloneKind = Literal["allreduce", "reduce-scatter", "all-gather", "broadcast"]
KINDS: tuple[AloneKind, ...] = get_args(AloneKind)
"""The collectives that are priced alone."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A collective of ``size_bytes`` (those of the whole array), its time and the ends of its interval in seconds.

    ``algbw_bytes_per_s`` is the size over the time, ``busbw_bytes_per_s`` what each device sends and receives over it,
    as nccl-tests defines them. ``rests_on`` says what prices it.
    """

    collective: Collective
    size_bytes: int
    seconds: float
    low_s: float
    high_s: float
    clusters: int
    rests_on: str
    extrapolated: bool

    @property
    def algbw_bytes_per_s(self) -> float:
        return self.size_bytes / self.seconds

    @property
    def busbw_bytes_per_s(self) -> float:
        n = self.collective.devices
        shares = {"allreduce": 2 * (n - 1) / n, "broadcast": 1.0}
        return self.algbw_bytes_per_s * shares.get(self.collective.kind, (n - 1) / n)


def predict_alone(machine: Machine, collective: Collective, size_bytes: int) -> Alone:
    """Price a collective with nothing else running. Raises ``ConfigError`` where the machine does not price it.

    The interval is that of ``dpsim.model.interval`` for a step that only communicates, as wide as intervals of
    collectives are (``dpsim.model.cells``).
    """
    priced = machine.priced(collective)
    seconds, extrapolated = cost(machine, priced, size_bytes)
    plan = Plan(
        devices=collective.devices,
        layout=collective.layout,
        global_batch=collective.devices,
        fusion_rule="one",
        algorithm=collective.algorithm,
    )
    schedule = scheduled(message(size_bytes), machine, plan)
    error, width = of_collective_alone(machine, priced, schedule)
    curve, cell = idle_curve(machine, priced), cell_of(machine, schedule)
    near = () if curve.scaled is None else tuple(str(each.layout or each.devices) for each in curve.scaled.tables)
    rests_on = "its table" if cell == "collective on known devices" else "the link"
    return Alone(
        collective=collective,
        size_bytes=size_bytes,
        seconds=seconds,
        low_s=seconds * math.exp(-error),
        high_s=seconds * math.exp(error),
        clusters=width.clusters,
        rests_on=f"tables of {' and '.join(near)}" if near else rests_on,
        extrapolated=extrapolated,
    )
