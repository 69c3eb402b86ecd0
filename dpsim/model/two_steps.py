"""Explains how much longer a step takes on more devices, from the step times alone that somebody measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec

from dpsim.errors import ConfigError
from dpsim.machine import Link, Machine
from dpsim.model.estimate import ROW_ERROR, Estimated, MeasuredStep, estimate
from dpsim.model.explanation import Explanation, Part, summed
from dpsim.model.prices import FREE_NETWORK
from dpsim.model.remedies import remedies
from dpsim.model.step import price, scheduled
from dpsim.plan import Plan
from dpsim.units import format_bandwidth
from dpsim.workload import Layer, Tensor, Workload

_LAYERS = 24
_LATENCY_S = 20e-6
_HARDLY = 1.1
"""Times as long as on fewer devices that a step has to be before its link is fitted: LEAST_SHARE of a cause."""
_IN_A_NODE = Link(latency_s=0.0, bandwidth_bytes_per_s=1e15)
"""Free: what a node's own devices take to communicate is part of the smallest step."""
_DEVIATIONS = NormalDist().inv_cdf(0.95)


def layers_of(gradient_bytes: float) -> Workload:
    """Return a workload of which only the bytes of its gradients are known: equal layers, without times."""
    elements = max(round(gradient_bytes / 4 / _LAYERS), 1)
    return Workload(
        name="a model",
        local_batches=(1,),
        layers=tuple(
            Layer(
                name=f"layer {number}",
                forward_s=(0.0,),
                backward_s=(0.0,),
                tensors=(Tensor(name=f"gradient {number}", shape=(elements,)),),
            )
            for number in range(1, _LAYERS + 1)
        ),
    )


def unknown_link(plan: Plan) -> Machine:
    """Return a machine whose link is to be fitted: between the nodes of the plan, or the devices of its only one."""
    link = Link(latency_s=_LATENCY_S, bandwidth_bytes_per_s=1e9)
    in_node = None if plan.layout and plan.layout.nodes == 1 else _IN_A_NODE
    return Machine(name="a link that the steps imply", link=link, link_in_node=in_node)


ANY_LINK = unknown_link(Plan(devices=1, global_batch=1))
"""A machine that stands for one that is not known."""


def explain_steps(workload: Workload, machine: Machine | None, rows: Sequence[MeasuredStep]) -> Explanation:
    """Return where the time of the step on the most devices goes, against that on the fewest.

    Without a ``machine`` the steps imply its link: what the model of DDP's overlap cannot hide of the gradients is all
    that the larger step takes longer. With one, whose tables or links price the collectives, its prediction is held
    against the step, and the difference is unexplained. Raises ``ConfigError`` for fewer than two numbers of devices.
    """
    ordered = sorted(rows, key=lambda row: row.plan.devices)
    first, last = ordered[0], ordered[-1]
    if first.plan.devices == last.plan.devices:
        raise ConfigError(
            f"step times of {first.plan.devices} devices alone",
            allowed="steps on two numbers of devices, such as 1:0.40s,16:0.61s",
            remedy="the smaller one says what computation takes: one device, or one node as 1x8",
        )
    noise_s = _DEVIATIONS * ROW_ERROR * last.step_s
    if machine is not None:
        fitted = estimate(workload, machine, [first], ("compute",))
    elif _alone(last, first) * _HARDLY < last.step_s:
        fitted = _fitted_link(workload, ordered)
    else:
        return _no_longer(workload, ordered, noise_s)
    schedule = scheduled(fitted.workload, fitted.machine, last.plan)
    priced = price(schedule, fitted.machine).prediction
    costs_s = priced.step_s - price(schedule, fitted.machine, FREE_NETWORK).step_s  # also the computation that it takes
    parts = [
        _part("computation", priced.step_s - costs_s - priced.waiting_for_slowest_s, noise_s, _computed(first)),
        _part("communication", costs_s, noise_s, _communicated(fitted, last, implied=machine is None)),
    ]
    if priced.waiting_for_slowest_s > 0:
        waited = "waiting for the slowest device, by the spread of the workload's steps"
        parts.append(_part("slowest rank", priced.waiting_for_slowest_s, noise_s, waited))
    return summed(
        workload.name,
        f"{last.plan.layout or last.plan.devices} devices",
        last.step_s,
        parts,
        _method(len(ordered), implied=machine is None),
        remedies=remedies(fitted.workload, fitted.machine, last.plan, last.step_s),
        notes=(*_work(first, last), *_notes(fitted, implied=machine is None)),
    )


def _fitted_link(workload: Workload, rows: Sequence[MeasuredStep]) -> Estimated:
    """Computation and a link that fit the steps. Raises ``ConfigError`` where communication does not show in them."""
    try:
        return estimate(workload, unknown_link(rows[-1].plan), rows, ("compute", "bandwidth"))
    except ConfigError as error:
        raise ConfigError(
            f"these steps tell no link: {error.given}",
            allowed="steps on more devices in which communication shows, and that agree with one link",
            remedy="give the link's prices instead: --network-log or --machine",
        ) from error


def _alone(last: MeasuredStep, first: MeasuredStep) -> float:
    """The step on the fewest devices at the local batch of the step on the most."""
    return first.step_s * last.plan.local_batch / first.plan.local_batch


def _part(kind: str, seconds: float, doubt_s: float, text: str) -> Part:
    low_s, high_s = max(seconds - doubt_s, 0.0), seconds + doubt_s
    return msgspec.convert(
        {"kind": kind, "seconds": seconds, "low_s": low_s, "high_s": high_s, "text": text}, Part, from_attributes=True
    )


def _no_longer(workload: Workload, rows: Sequence[MeasuredStep], noise_s: float) -> Explanation:
    first, last = rows[0], rows[-1]
    computed_s = min(_alone(last, first), last.step_s)
    return summed(
        workload.name,
        f"{last.plan.layout or last.plan.devices} devices",
        last.step_s,
        [_part("computation", computed_s, noise_s, _computed(first))],
        _method(len(rows), implied=True),
        notes=(
            *_work(first, last),
            "The step is hardly longer on more devices than on fewer, so it tells nothing of the link",
        ),
    )


def _computed(first: MeasuredStep) -> str:
    devices = first.plan.layout or first.plan.devices
    return f"what {'one device computes' if devices == 1 else f'{devices} devices take by themselves'}"


def _work(first: MeasuredStep, last: MeasuredStep) -> tuple[str, ...]:
    """What a longer step says of the samples: on more devices it trains more of them, where each has the same batch."""
    times = last.plan.global_batch / first.plan.global_batch
    if last.plan.local_batch != first.plan.local_batch:
        return ()
    return (
        f"With the same batch on each device, the same number of steps trains {times:g} times the samples on"
        f" {last.plan.devices} devices as on {first.plan.devices}: the same samples take 1/{times:g} of the steps, and"
        f" {last.step_s / first.step_s / times:.2f} times as long",
    )


def _communicated(fitted: Estimated, last: MeasuredStep, *, implied: bool) -> str:
    if not implied:
        return f"communication that the machine file ({fitted.machine.name}) leaves exposed"
    plan = last.plan
    (number,) = (each for each in fitted.numbers if each.name == "bandwidth")
    factor = math.exp(_DEVIATIONS * number.relative_uncertainty)
    low, value, high = (format_bandwidth(number.value * each) for each in (1 / factor, 1.0, factor))
    between = "between the nodes" if plan.layout.nodes > 1 else "between the devices"
    return f"communication that is not hidden: as over a link of {value} {between} (90 %: {low} to {high})"


def _method(count: int, *, implied: bool) -> str:
    if implied:
        return f"{count} step times, whose difference is taken for communication"
    return "the step on the fewest devices, and the machine file's prices of collectives"


def _notes(fitted: Estimated, *, implied: bool) -> tuple[str, ...]:
    fields = ", ".join(field for field in fitted.machine.assumed if field != "interval_widths")
    assumed = [f"Assumed, as dpsim predict does for published machines: {fields}"] if fields else []
    if not implied:
        return tuple(assumed)
    return (
        "Step times alone cannot tell a slow link from a slow rank or loader: a log of nccl-tests (--network-log)"
        " or the script itself (--torch-script) can",
        *assumed,
    )
