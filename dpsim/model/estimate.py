"""Fits the few numbers that a workload's shapes leave open to step times that somebody measured or published.

A step's length is ``dpsim.model.step.price`` of the rows' plans; what is free are numbers of the workload (how long
it computes) and of the machine (what a collective costs). Least squares of the logarithm of predicted over measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.columns import Unit
from dpsim.errors import ConfigError, unknown
from dpsim.machine import ComputeSlowdown, Link, Machine
from dpsim.model.defaults import with_defaults
from dpsim.model.interval import COMMON_MODEL_ERROR, OWN_MODEL_ERROR
from dpsim.model.step import price, scheduled
from dpsim.model.uncertainty import NORMAL_95
from dpsim.plan import Plan
from dpsim.workload import Workload

Floats = NDArray[np.float64]
ROW_ERROR = math.hypot(COMMON_MODEL_ERROR, OWN_MODEL_ERROR)
"""The standard error of a row's logarithm at least: the model's own error, which agreeing rows do not take away."""
_STEP = 1e-3
_SEARCHES = 6
_BLIND = 1e-4
"""A number is not told where no row's step changes by this part of the number's own change."""
_FAR = 2.0
"""A row that the best fit misses by more than this factor contradicts the others, or was mistyped."""
_ALIKE = 1e-3
"""Numbers are not told apart where the least singular value of their scaled derivatives is below this."""
_BACKWARD_SHARE = 2 / 3
"""The part of the computation that is backward's where a workload says nothing: two products for each of forward's."""


class MeasuredStep(NamedTuple):
    """A plan, and how long its step took in seconds."""

    plan: Plan
    step_s: float


@dataclass(frozen=True, kw_only=True)
class FreeNumber:
    """A number that may be fitted: what it is, which rows tell it, where the search begins, and its bounds.

    ``starts`` are seconds in units of the median step, and bandwidths in units of all gradients in such a step.
    """

    name: str
    unit: Unit
    text: str
    told_by: str
    starts: tuple[float, ...]
    low: float
    high: float


FREE = {
    number.name: number
    for number in (
        FreeNumber(
            name="compute",
            unit="s",
            text="computation of a step on one device at the smallest local batch of the rows",
            told_by="a row of one device",
            starts=(1.0,),
            low=1e-9,
            high=1e9,
        ),
        FreeNumber(
            name="bandwidth",
            unit="bytes/s",
            text="bandwidth of the link, each way",
            told_by="a row of more devices, or of a smaller batch, in which communication shows",
            starts=(1.0, 10.0, 100.0),
            low=1.0,
            high=1e15,
        ),
        FreeNumber(
            name="latency",
            unit="s",
            text="latency of a message over the link",
            told_by="a row with many small buckets, or on many devices",
            starts=(1e-5, 1e-3),
            low=1e-9,
            high=10.0,
        ),
        FreeNumber(
            name="overhead",
            unit="s",
            text="what the host adds to each collective",
            told_by="a row with another number of buckets",
            starts=(1e-5, 1e-2),
            low=1e-9,
            high=10.0,
        ),
        FreeNumber(
            name="contention",
            unit="ratio",
            text="times as long as alone that a collective takes beside backward",
            told_by="a row with overlap beside one without",
            starts=(1.1, 2.0),
            low=1.0,
            high=20.0,
        ),
        FreeNumber(
            name="loss",
            unit="ratio",
            text="times as long as one device that two compute, which wait for the slowest",
            told_by="a row of one device beside those of several",
            starts=(1.03, 1.2),
            low=1.0,
            high=20.0,
        ),
        FreeNumber(
            name="growth",
            unit="ratio",
            text="what each further doubling of the devices adds to the logarithm of the loss",
            told_by="rows of three numbers of devices or more",
            starts=(0.01, 0.05),
            low=1e-3,
            high=1.0,
        ),
        FreeNumber(
            name="taken",
            unit="ratio",
            text="the part of a collective's time inside a node that computation beside it takes longer",
            told_by="rows with overlap inside a node, whose collectives differ",
            starts=(0.3,),
            low=1e-2,
            high=1.0,
        ),
    )
}
"""The numbers that can be free, by their names."""
DEFAULT_FREE = ("compute", "bandwidth")
_MACHINE_FIELDS = {
    "overhead": "collective_overhead_s",
    "contention": "contention",
    "growth": "loss_growth",
    "taken": "computation_taken",
}
"""The fields of a machine that free numbers are, by their names."""
_SHARES = ("growth", "taken")
"""Those whose uncertainty is a standard error of the number and not of its logarithm."""
_OF_COMMUNICATION = {"bandwidth", "latency", "overhead", "contention"}


class _UntoldError(ConfigError):
    """No row tells these free numbers."""

    def __init__(self, names: Sequence[str], given: str, *, allowed: str, remedy: str) -> None:
        super().__init__(given, allowed=allowed, remedy=remedy)
        self.names = tuple(names)


class Fitted(NamedTuple):
    """A fitted number with one relative standard error, and whether it lies at the end of what it can be."""

    name: str
    value: float
    relative_uncertainty: float
    at_bound: bool


class Estimated(NamedTuple):
    """The files that follow from the fit, its numbers, and predicted over measured of each row, minus 1.

    ``loses_less`` says that several devices lose less than is assumed, so that nothing was taken to be lost.
    """

    workload: Workload
    machine: Machine
    numbers: tuple[Fitted, ...]
    errors: tuple[float, ...]
    loses_less: bool


def estimate(
    workload: Workload, machine: Machine, rows: Sequence[MeasuredStep], free: Sequence[str] = DEFAULT_FREE
) -> Estimated:
    """Return workload and machine with the free numbers (names of ``FREE``) that fit the rows best.

    ``compute`` scales all times of the workload, which keep their proportions; a workload without times gets some from
    the sizes of its layers. The other numbers are the machine's. Standard errors are those of least squares, by the
    scatter of the rows and at least ``ROW_ERROR``. Raises ``ConfigError`` for fewer rows than free numbers, for a
    number that no row tells, and for numbers that the rows cannot tell apart. What a published machine leaves open and
    is not free is assumed (``dpsim.model.defaults``), and the estimated machine states it. Rows that lose less than is
    assumed, so that they leave nothing for communication, are fitted without a loss.
    """
    names = _checked(machine, rows, free)
    known = tuple(sorted({row.plan.devices for row in rows})) if "compute" in names else ()
    assuming = msgspec.structs.replace(_open(with_defaults(workload, machine), names), known_devices=known)
    try:
        return _fit(workload, assuming, rows, names, loses_less=False)
    except _UntoldError as error:
        lossless = _without_loss(assuming)
        if lossless == assuming or not _OF_COMMUNICATION & {*error.names}:
            raise
    return _fit(workload, lossless, rows, names, loses_less=True)


def _fit(
    workload: Workload, machine: Machine, rows: Sequence[MeasuredStep], names: Sequence[str], *, loses_less: bool
) -> Estimated:
    """Return the fit of these free numbers on a machine that states or assumes all else. Raises ``ConfigError``."""
    from scipy.optimize import least_squares

    base = _with_times(workload, min(row.plan.local_batch for row in rows))

    def inputs(logarithms: Floats) -> tuple[Workload, Machine]:
        values = dict(zip(names, np.exp(logarithms).tolist(), strict=True))
        return _with_values(base, machine, values)

    def misfits(logarithms: Floats) -> Floats:
        trained, fitted_machine = inputs(logarithms)
        steps = [price(scheduled(trained, fitted_machine, row.plan), fitted_machine).step_s for row in rows]
        ratios: Floats = np.log(np.array(steps) / [row.step_s for row in rows])
        return ratios

    ends = np.log([(FREE[name].low, FREE[name].high) for name in names]).T
    step_s = float(np.median([row.step_s for row in rows]))
    scales = {"s": step_s, "bytes/s": max(workload.gradient_bytes, 1) / step_s}
    searched = [
        least_squares(misfits, start, bounds=ends, x_scale="jac", diff_step=_STEP, xtol=1e-9, ftol=1e-12, max_nfev=100)
        for start in _starts(names, misfits, scales, ends)
    ]
    fit = min(searched, key=lambda each: float(each.cost))
    derivatives = _derivatives(misfits, fit.x, ends)
    _check_missed(rows, fit.fun)
    _check_told(names, rows, derivatives)
    numbers = _fitted(names, fit, derivatives, ends)
    trained, fitted_machine = inputs(fit.x)
    doubts = {number.name: number.relative_uncertainty for number in numbers}
    return Estimated(
        workload=msgspec.structs.replace(
            trained, relative_uncertainty=doubts.get("compute", workload.relative_uncertainty)
        ),
        machine=_with_doubts(fitted_machine, doubts),
        numbers=numbers,
        errors=tuple(np.expm1(fit.fun).tolist()),
        loses_less=loses_less,
    )


def _without_loss(machine: Machine) -> Machine:
    """Return a machine on which nothing is assumed to be lost by several devices, with the same doubts."""
    changes: dict[str, object] = {}
    if "compute_slowdown" in machine.assumed:
        changes["compute_slowdown"] = tuple(
            msgspec.structs.replace(each, factor=1.0) for each in machine.compute_slowdown
        )
    if "loss_growth" in machine.assumed:
        changes["loss_growth"] = 0.0
    return msgspec.structs.replace(machine, **changes)


def _fitted(names: Sequence[str], fit: Any, derivatives: Floats, ends: Floats) -> tuple[Fitted, ...]:
    """Return the numbers of a fit of logarithms, with the standard errors of least squares."""
    scatter = float(np.sum(fit.fun**2)) / max(len(fit.fun) - len(names), 1)
    covariance = np.linalg.inv(derivatives.T @ derivatives) * max(scatter, ROW_ERROR**2)
    errors = np.minimum(np.sqrt(np.diag(covariance)), 10.0)
    return tuple(
        Fitted(name, float(math.exp(x)), float(error), bool(min(abs(x - end) for end in bounds) < _STEP))
        for name, x, error, bounds in zip(names, fit.x, errors, ends.T, strict=True)
    )


def free_names(free: Sequence[str]) -> tuple[str, ...]:
    """Return the names of free numbers in the order of ``FREE``. Raises ``ConfigError`` for one that does not exist."""
    for name in free:
        if name not in FREE:
            raise unknown("free number", name, FREE)
    if not free:
        raise ConfigError("no free number", allowed=", ".join(FREE))
    return tuple(name for name in FREE if name in free)


def _checked(machine: Machine, rows: Sequence[MeasuredStep], free: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the free numbers. Raises ``ConfigError`` for what cannot be fitted whatever the rows say."""
    names = free_names(free)
    for number, row in enumerate(rows, start=1):
        if not 0 < row.step_s < math.inf:
            raise ConfigError(f"row {number}: a step of {row.step_s} s", allowed="finite seconds > 0")
    if len(rows) < len(names):
        raise ConfigError(
            f"{len(names)} free numbers ({', '.join(names)}), and rows: {len(rows)}",
            allowed="at least as many rows as free numbers",
            remedy=f"give more rows, or let fewer be free: --free {','.join(names[: max(len(rows), 1)])}",
        )
    if {"bandwidth", "latency"} & {*names} and machine.allreduce:
        raise ConfigError(
            f"machine {machine.name!r} has tables of allreduces, and {' and '.join(names)} are free",
            allowed="a link that is fitted, or tables",
            remedy="leave bandwidth and latency out of --free, or the machine file",
        )
    tables = ("contention", machine.overlap), ("taken", machine.overlap), ("loss", machine.compute_slowdown)
    for name, table in tables:
        if name in names and table:
            raise ConfigError(
                f"{name} is free, and machine {machine.name!r} has tables that say it",
                allowed=f"one of the two, tables or a free {name}",
                remedy=f"leave {name} out of --free",
            )
    return names


def _open(machine: Machine, names: Sequence[str]) -> Machine:
    """Return a machine without what is assumed of a number that is free."""
    fields = {
        "loss": ("compute_slowdown", ()),
        "growth": ("loss_growth", None),
        "contention": ("contention", None),
        "taken": ("computation_taken", None),
    }
    changes: dict[str, object] = dict(fields[name] for name in names if name in fields)
    assumed = tuple(name for name in machine.assumed if name not in changes)
    return msgspec.structs.replace(machine, assumed=assumed, **changes)


def _with_times(workload: Workload, local_batch: float) -> Workload:
    """Return a workload that computes for one second at a local batch; without times, by the sizes of its layers.

    A layer's share is then that of the bytes that it reads and writes: its parameters, and the batch's activations.
    """
    times = workload.times(local_batch)
    total_s = float(times.forward_s.sum() + times.backward_s.sum()) + workload.update_s + times.overhead_s
    if total_s > 0:
        return workload.slowed(1 / total_s)
    sizes = np.array(
        [
            sum(tensor.size_bytes for tensor in layer.tensors) + layer.activation_bytes_per_sample * local_batch
            for layer in workload.layers
        ]
    )
    shares = sizes / sizes.sum() if sizes.sum() > 0 else np.full(len(sizes), 1 / len(sizes))
    batch = max(round(local_batch), 1)
    layers = tuple(
        msgspec.structs.replace(
            layer,
            forward_s=((1 - _BACKWARD_SHARE) * share,),
            backward_s=(_BACKWARD_SHARE * share,),
        )
        for layer, share in zip(workload.layers, shares.tolist(), strict=True)
    )
    return msgspec.structs.replace(workload, local_batches=(batch,), layers=layers)


def _with_values(base: Workload, machine: Machine, values: Mapping[str, float]) -> tuple[Workload, Machine]:
    """Return workload and machine with these values of free numbers; ``base`` computes for one second."""
    trained = base.slowed(values["compute"]) if "compute" in values else base
    changes: dict[str, object] = {}
    of_link = {
        field: values[name]
        for name, field in (("bandwidth", "bandwidth_bytes_per_s"), ("latency", "latency_s"))
        if name in values
    }
    if of_link:
        link = machine.link or Link(latency_s=0.0, bandwidth_bytes_per_s=math.inf)
        changes["link"] = msgspec.structs.replace(link, **of_link)
    changes |= {field: values[name] for name, field in _MACHINE_FIELDS.items() if name in values}
    if "loss" in values:
        changes["compute_slowdown"] = (ComputeSlowdown(devices=2, factor=values["loss"]),)
    return trained, msgspec.structs.replace(machine, **changes)


def _with_doubts(machine: Machine, doubts: Mapping[str, float]) -> Machine:
    """Return a machine that states the standard errors of its fitted numbers."""
    changes: dict[str, object] = {}
    of_link = [doubts[name] for name in ("bandwidth", "latency") if name in doubts]
    if of_link and machine.link is not None:
        changes["link"] = msgspec.structs.replace(machine.link, relative_uncertainty=max(of_link))
    for name, field in _MACHINE_FIELDS.items():
        if name in doubts:
            of_share = getattr(machine, field) if name in _SHARES else 1.0
            changes[f"{field.removesuffix('_s')}_uncertainty"] = of_share * doubts[name]
    if "loss" in doubts:
        changes["compute_slowdown"] = tuple(
            msgspec.structs.replace(each, half_width=NORMAL_95 * doubts["loss"]) for each in machine.compute_slowdown
        )
    return msgspec.structs.replace(machine, **changes)


def _starts(
    names: Sequence[str], misfits: Callable[[Floats], Floats], scales: Mapping[str, float], ends: Floats
) -> list[Floats]:
    """Return the logarithms that searches begin from: the best of all combinations of the numbers' ``starts``."""
    numbers = [FREE[name] for name in names]
    axes = [np.log([scales.get(number.unit, 1.0) * start for start in number.starts]) for number in numbers]
    points: list[Floats] = []
    for combination in itertools.product(*axes):
        at: Floats = np.clip(np.array(combination), *ends)
        for _ in range(3 if "compute" in names else 0):
            at[0] -= float(np.median(misfits(at)))  # compute is the first of all numbers
        points.append(np.clip(at, *ends))
    return sorted(points, key=lambda point: float(np.sum(misfits(point) ** 2)))[:_SEARCHES]


def _derivatives(misfits: Callable[[Floats], Floats], at: Floats, ends: Floats) -> Floats:
    """Return d log(step) / d log(number), (rows, numbers), by differences over a percent inside the bounds."""
    columns: list[Floats] = []
    for number in range(len(at)):
        sides = []
        for sign in (-1, 1):
            moved = at.copy()
            moved[number] = np.clip(at[number] + sign * 10 * _STEP, *ends[:, number])
            sides.append(moved)
        columns.append((misfits(sides[1]) - misfits(sides[0])) / (sides[1] - sides[0])[number])
    derivatives: Floats = np.column_stack(columns)
    return derivatives


def _check_told(names: Sequence[str], rows: Sequence[MeasuredStep], derivatives: Floats) -> None:
    """Refuse numbers that no row tells, and numbers that the rows do not tell apart. Raises ``ConfigError``."""
    lengths = np.sqrt(np.sum(derivatives**2, axis=0))
    blind = [name for name, length in zip(names, lengths, strict=True) if length < _BLIND]
    if blind:
        raise _UntoldError(
            blind,
            f"no row tells {' and '.join(blind)}: steps stay as they are whatever it is",
            allowed="rows whose step depends on every free number",
            remedy=f"add {' and '.join(dict.fromkeys(FREE[name].told_by for name in blind))}; or leave"
            f" {' and '.join(blind)} out of --free",
        )
    _, singular, directions = np.linalg.svd(derivatives / lengths)
    if singular[-1] < _ALIKE:
        mixed = [name for name, part in zip(names, directions[-1], strict=True) if abs(part) > 0.1]
        raise ConfigError(
            f"these {len(rows)} rows cannot tell {' and '.join(mixed)} apart: more of one and less of the other fit"
            " them as well",
            allowed="rows in which the free numbers weigh differently",
            remedy=f"add {' or '.join(dict.fromkeys(FREE[name].told_by for name in mixed))}; or leave one of them out"
            " of --free",
        )


def _check_missed(rows: Sequence[MeasuredStep], misfits: Floats) -> None:
    """Refuse rows that no numbers fit: the best ones miss one by more than a factor. Raises ``ConfigError``."""
    worst = int(np.argmax(np.abs(misfits)))
    if abs(misfits[worst]) > math.log(_FAR):
        plan, step_s = rows[worst]
        raise ConfigError(
            f"row {worst + 1}: a step of {plan.global_batch} samples on {plan.layout or plan.devices} devices took "
            f"{step_s:.3g} s, and the numbers that fit all rows best say {step_s * math.exp(misfits[worst]):.3g} s",
            allowed=f"rows of which each can be fitted to a factor of {_FAR:g}",
            remedy="look for a wrong unit, or rows of the same setting with other times; or free a number that differs",
        )
