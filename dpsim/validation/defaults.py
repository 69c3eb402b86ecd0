"""Inputs that published machines leave open: what the other sets say of each, in place of a default."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from dpsim.grouping import grouped
from dpsim.machine import ComputeSlowdown
from dpsim.predict.defaults import with_defaults
from dpsim.predict.uncertainty import NORMAL_95
from dpsim.validation.case import Case, parts
from dpsim.validation.inputs import Fill, RowInputs, fitted_step_inputs, outcome_s
from dpsim.validation.published import PublishedSet

_ALIKE = 1e-3
"""Where the mean misfits of all values differ by no more, a set says nothing of a default."""


@dataclass(frozen=True, kw_only=True)
class Default:
    """An input that cases may leave open.

    ``values`` are those that are tried on a set. ``fill(inputs, value, doubt)`` puts a value with its relative standard
    error into the inputs of a row, and leaves them as they are where they state the input.
    """

    name: str
    text: str
    values: tuple[float, ...]
    fill: Callable[[RowInputs, float, float], RowInputs]


class Assumed(NamedTuple):
    """A value of a default and its relative standard error."""

    default: Default
    value: float
    doubt: float


def together(inputs: RowInputs, factor: float, doubt: float) -> RowInputs:
    """Let computation on several devices take ``factor`` times as long as on one, where nothing is stated of it."""
    devices = inputs.plan.devices
    if devices == 1 or inputs.machine.compute_slowdown or inputs.workload.step_spread:
        return inputs
    slowdown = ComputeSlowdown(devices=devices, factor=factor, half_width=NORMAL_95 * doubt)
    return replace(inputs, machine=msgspec.structs.replace(inputs.machine, compute_slowdown=(slowdown,)))


def contention(inputs: RowInputs, factor: float, doubt: float) -> RowInputs:
    """Let a collective beside backward take ``factor`` times as long as alone, where nothing is stated of it."""
    machine = inputs.machine
    if inputs.plan.devices == 1 or inputs.plan.overlap == "off" or machine.overlap or machine.contention is not None:
        return inputs
    stated = msgspec.structs.replace(machine, contention=factor, contention_uncertainty=doubt)
    return replace(inputs, machine=stated)


DEFAULTS = (
    Default(
        name="synchronisation loss",
        text="how many times as long computation takes on several devices as on one: what waiting for the slowest, and "
        "for launches and input beside it, costs",
        values=(1.0, 1.02, 1.04, 1.06, 1.08, 1.1, 1.13, 1.16, 1.2, 1.3, 1.5),
        fill=together,
    ),
    Default(
        name="contention",
        text="how many times as long an allreduce takes beside a running backward as alone",
        values=(1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0),
        fill=contention,
    ),
)
"""The defaults that are estimated from the other sets."""


def as_shipped(inputs: RowInputs) -> RowInputs:
    """Return the inputs with the defaults that come with dpsim, as ``dpsim predict`` takes them."""
    machine = with_defaults(inputs.workload, inputs.machine, [inputs.plan.devices])
    return replace(inputs, machine=machine)


def filling(assumed: Sequence[Assumed]) -> Fill:
    """Return what puts these values into the inputs of a row."""
    return functools.partial(_filled, tuple(assumed))


def _filled(assumed: Sequence[Assumed], inputs: RowInputs) -> RowInputs:
    for each in assumed:
        inputs = each.default.fill(inputs, each.value, each.doubt)
    return inputs


def of_other_sets(
    cases: Iterable[Case], sets: Mapping[str, PublishedSet], defaults: Sequence[Default] = DEFAULTS
) -> dict[str, tuple[Assumed, ...]]:
    """Return for each set of steps what the other sets imply of each default, with its doubt.

    The value that a set implies has the least mean |log(predicted / published)| over all its rows that are no inputs of
    every part. A set takes the median of the values of the others, and as its doubt their standard deviation in
    logarithms; it takes none where no other set tells. Of several defaults each is estimated beside those before it.
    """
    by_set = grouped((case for case in cases if case.quantity == "step"), lambda case: case.dataset)
    found: dict[str, tuple[Assumed, ...]] = dict.fromkeys(by_set, ())
    for default in defaults:
        implied = {name: _implied(of_set, sets, found[name], default) for name, of_set in by_set.items()}
        for name in by_set:
            others = [value for other, value in implied.items() if other != name and value is not None]
            if others:
                assumed = Assumed(default, float(np.median(others)), float(np.std(np.log(others))))
                found[name] = (*found[name], assumed)
    return found


def _implied(
    cases: Sequence[Case], sets: Mapping[str, PublishedSet], before: Sequence[Assumed], default: Default
) -> float | None:
    """Return the value of a default with which the cases of a set are predicted best.

    ``None`` where all are alike, and where the largest one is the best: then something else that the set does not state
    makes its steps longer.
    """

    def misfit(value: float) -> float:
        fill, errors = filling((*before, Assumed(default, value, 0.0))), list[float]()
        for case in cases:
            published = sets[case.dataset]
            for part in parts(case, published, whole=True):
                inputs = fitted_step_inputs(part, sets, fill)
                for row in part.judged:
                    if row.outcome is not None:
                        own = inputs[row.line]
                        errors.append(abs(math.log(own.step_s() / outcome_s(row, published, own.plan))))
        return float(np.mean(errors))

    misfits = {value: misfit(value) for value in default.values}
    best = min(misfits, key=misfits.__getitem__)
    tells = max(misfits.values()) - min(misfits.values()) > _ALIKE and best < default.values[-1]
    return best if tells else None
