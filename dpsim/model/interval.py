"""Predictions with the interval that holds the measured step with a probability of 90 %."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from statistics import NormalDist

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.collective import Collective
from dpsim.machine import Machine
from dpsim.model.prices import FREE_NETWORK, Factors
from dpsim.model.residuals import LEVEL, width_of
from dpsim.model.step import Prediction, PricedStep, price, scheduled
from dpsim.model.uncertainty import Uncertainty, network_error, of_each_size, uncertainty
from dpsim.plan import Plan
from dpsim.schedule import Schedule
from dpsim.uncertainty import CONTENTION_ENDS, IntervalWidth
from dpsim.workload import Workload

Floats = NDArray[np.float64]
_DEVIATIONS = NormalDist().inv_cdf((1 + LEVEL) / 2)
_OVERLAPPED = Uncertainty._fields.index("overlapped")
_LARGEST_EXPONENT = math.log(sys.float_info.max)
COMMON_MODEL_ERROR = 0.02
"""The relative error of the model that all plans of one workload and machine share; one standard error."""
OWN_MODEL_ERROR = 0.015
"""The relative error of the model that differs from plan to plan: the scatter of the errors within one sweep."""
EMULATED_MODEL_ERROR, EMULATED_OWN_ERROR = 0.006, 0.01
"""The model's errors where computation is emulated, for each device and for each plan: layers take the times of the
workload by definition, but the messages of all devices share the processors of one machine."""

EMULATED_LINK_SHARE = 0.5
"""The power of the machine's speed by which collectives alone on an emulated link take longer: the link itself does not
become slower, but ranks wait for each other and for their processors at every message."""


@dataclass(frozen=True, eq=False)
class Interval:
    """The ends of an interval, and how much each uncertainty makes of it.

    ``shifts`` (2, parts): by how much the logarithm of the step changes where the machine's speed, the layer times,
    the collectives, and the two costs of overlap are one standard error longer (row 0) or shorter (row 1). ``width`` is
    the factor by which past studies widen the interval, and how many there were.
    ``of_each_size`` are the columns of which every size of a collective has an error of its own, and ``sizes_bytes``
    the different sizes that the plan has (none: it communicates nothing). ``assumed`` are the columns of what is
    assumed of any machine: the contention.
    """

    low_s: float
    high_s: float
    shifts: Floats
    width: IntervalWidth
    of_each_size: tuple[int, ...] = ()
    sizes_bytes: tuple[float, ...] = ()
    assumed: tuple[int, ...] = ()

    def unknown(self, *, longer: bool) -> str:
        """Return what makes most of the interval on one side: a field of ``Uncertainty``, or ``model``."""
        parts = np.max(self.shifts if longer else -self.shifts, axis=0, initial=0.0)
        largest = int(parts.argmax())
        model = math.hypot(COMMON_MODEL_ERROR, OWN_MODEL_ERROR)
        return Uncertainty._fields[largest] if parts[largest] > model else "model"


def predict(workload: Workload, machine: Machine, plan: Plan) -> Prediction:
    """The predicted step of a plan: its schedule, priced, with its interval and the cost of communication."""
    return predict_with_interval(workload, machine, plan)[0]


def predict_with_interval(workload: Workload, machine: Machine, plan: Plan) -> tuple[Prediction, Interval]:
    """(``predict``, the interval of it with its parts)."""
    return of_schedule(scheduled(workload, machine, plan), machine)


def of_schedule(schedule: Schedule, machine: Machine) -> tuple[Prediction, Interval]:
    """``predict_with_interval`` of a plan's schedule."""
    priced = price(schedule, machine)
    ends = interval(priced, schedule)
    free_s = price(schedule, machine, FREE_NETWORK).step_s if schedule.plan.devices > 1 else priced.step_s
    prediction = msgspec.structs.replace(
        priced.prediction,
        communication_cost_s=priced.step_s - free_s,
        low_s=ends.low_s,
        high_s=ends.high_s,
        interval_level=LEVEL if ends.width.studies else None,
        interval_factor=ends.width.factor,
        interval_studies=ends.width.studies,
        interval_clusters=ends.width.clusters,
    )
    return prediction, ends


def interval(priced: PricedStep, schedule: Schedule) -> Interval:
    """The interval that is to hold the median step of a later run with a probability of 90 %.

    low = step exp(-f z sqrt(sum d_down^2 + m^2)), high = step exp(f z sqrt(sum d_up^2 + m^2)), z = 1.645: the schedule
    is priced again with each of the uncertainties (``dpsim.model.uncertainty``) one standard error up and one down,
    where d is the change of the step's logarithm. m is the model's own error (``COMMON_MODEL_ERROR`` and
    ``OWN_MODEL_ERROR``, or the two of emulated computation). What is to be held is the median over the samples of a
    run; its own sampling error is part of the uncertainty of the machine's speed. f is what the errors of past studies
    call for (``dpsim.model.residuals.width_of``); without them it is assumed, and the level is not promised. Where the
    contention is assumed, z d is the way to each of ``CONTENTION_ENDS``, and f does not shorten it.
    """
    errors, step_s = uncertainty(schedule, priced.machine), priced.step_s
    width = width_of(priced.machine, schedule)
    steps = _shifted_steps(priced, schedule, errors)
    if not step_s > 0:
        return Interval(step_s, step_s, np.zeros_like(steps), width)
    shifts = np.log(np.maximum(steps, 1e-300) / step_s)
    factors = np.full(len(Uncertainty._fields), width.factor)
    assumed = (_OVERLAPPED,) if "contention" in priced.machine.assumed else ()
    shifts[:, list(assumed)] /= _DEVIATIONS
    factors[list(assumed)] = 1.0
    model = width.factor * math.hypot(*_model_errors(schedule))
    up = math.hypot(model, *(factors * np.maximum(shifts, 0).max(axis=0)).tolist())
    down = math.hypot(model, *(factors * np.maximum(-shifts, 0).max(axis=0)).tolist())
    return Interval(
        step_s * _power(-_DEVIATIONS * down),
        step_s * _power(_DEVIATIONS * up),
        shifts,
        width,
        of_each_size=tuple(map(Uncertainty._fields.index, of_each_size(schedule, priced.machine))),
        sizes_bytes=tuple(np.unique(schedule.summed_bytes).tolist()),
        assumed=assumed,
    )


def of_collective_alone(machine: Machine, collective: Collective, schedule: Schedule) -> tuple[float, IntervalWidth]:
    """Return (half the interval of a collective's logarithm, its width): ``interval`` of a step that is nothing else.

    ``schedule`` is that of a message of its size on its devices.
    """
    speed, width = uncertainty(schedule, machine).speed, width_of(machine, schedule)
    network = network_error(machine, collective, schedule.summed_bytes.astype(float))
    return width.factor * _DEVIATIONS * math.hypot(*_model_errors(schedule), speed, network), width


def _power(exponent: float) -> float:
    """exp(exponent); infinity where that is beyond all numbers, which leaves an interval open."""
    return math.exp(exponent) if exponent < _LARGEST_EXPONENT else math.inf


def _apart(one: Interval, other: Interval) -> tuple[Floats, Floats]:
    """By how much the logarithm of one step over the other changes with each uncertainty (2, parts).

    First what shifts both plans, of which the difference remains, with its sign; then what each has for itself, of
    which both remain: the sampling errors of collectives of other sizes, which say nothing of each other.
    """
    shared, own = one.shifts - other.shifts, np.zeros_like(one.shifts)
    if one.sizes_bytes and other.sizes_bytes and one.sizes_bytes != other.sizes_bytes:
        columns = [column for column in one.of_each_size if column in other.of_each_size]
        own[:, columns] = np.hypot(one.shifts, other.shifts)[:, columns]
        shared[:, columns] = 0.0
    return shared, own


def _model_errors(schedule: Schedule) -> tuple[float, float]:
    """(the error that all plans share, that of each plan)."""
    if not schedule.workload.emulated_compute:
        return COMMON_MODEL_ERROR, OWN_MODEL_ERROR
    return EMULATED_MODEL_ERROR * schedule.plan.devices, EMULATED_OWN_ERROR


def equally_fast(slower: tuple[Prediction, Interval], faster: tuple[Prediction, Interval]) -> bool:
    """Whether a plan that is predicted to be slower may well be as fast as another one, at the same level.

    Both rest on one workload and machine, so what is uncertain about these shifts both: only what brings the two nearer
    to each other counts, with what each has for itself: the model's own error, and those of the sizes that it sends.
    """
    (slow, of_slow), (fast, of_fast) = slower, faster
    if not fast.step_s > 0:
        return slow.step_s <= fast.step_s
    shared, own = _apart(of_fast, of_slow)
    nearer = np.maximum(shared, 0).max(axis=0)
    error = math.hypot(OWN_MODEL_ERROR, OWN_MODEL_ERROR, *nearer.tolist(), *own.max(axis=0).tolist())
    return math.log(slow.step_s / fast.step_s) <= _DEVIATIONS * error


def ratio_interval(
    over: tuple[Prediction, Interval], under: tuple[Prediction, Interval], *, of_two_machines: bool = False
) -> tuple[float, float]:
    """The interval of a step over another one of the same workload, at the same level.

    What is uncertain about both shifts both, but for sampling errors of collectives where the two send other sizes:
    prices of neighbouring bucket caps are measured apart. Of two machines it is the layer times alone, and what is
    assumed of both: the devices are the same. On one machine ``under`` is of as many devices or more, whose layer times
    are the more uncertain by what they slow each other down.
    The width is the model's own: past studies do not tell how far off ratios were.
    """
    (top, of_top), (bottom, of_bottom) = over, under
    if not (top.step_s > 0 and bottom.step_s > 0):
        return 1.0, 1.0
    first, second = of_top.shifts, of_bottom.shifts
    compute, share = (Uncertainty._fields.index(name) for name in ("compute", "fixed_share"))
    if of_two_machines:
        of_both = [compute, share, *(column for column in of_top.assumed if column in of_bottom.assumed)]
        common, alone = np.zeros_like(first), np.hypot(first, second[::-1])
        common[:, of_both] = (first - second)[:, of_both]
        alone[:, of_both] = 0.0
    else:
        common, alone = _apart(of_top, of_bottom)
        alone[:, compute] = np.sqrt(np.maximum(np.square(second) - np.square(first), 0.0)[:, compute])
        alone = np.broadcast_to(alone.max(axis=0), alone.shape)
    model = math.hypot(OWN_MODEL_ERROR, OWN_MODEL_ERROR)
    up = math.hypot(model, *alone[0].tolist(), *np.maximum(common, 0).max(axis=0).tolist())
    down = math.hypot(model, *alone[1].tolist(), *np.maximum(-common, 0).max(axis=0).tolist())
    ratio = top.step_s / bottom.step_s
    return ratio * _power(-_DEVIATIONS * down), ratio * _power(_DEVIATIONS * up)


def undecided(one: Interval, other: Interval) -> str:
    """What is the most uncertain about the difference of two plans of one workload and machine.

    A field of ``Uncertainty``, or ``model``: the model's own error.
    """
    shared, own = _apart(one, other)
    apart = (np.abs(shared) + own).max(axis=0)
    if apart.max() <= math.hypot(OWN_MODEL_ERROR, OWN_MODEL_ERROR):
        return "model"
    return Uncertainty._fields[int(apart.argmax())]


def _shifted_steps(priced: PricedStep, schedule: Schedule, errors: Uncertainty) -> Floats:
    """The step with each uncertainty one standard error up (row 0), down (row 1); an assumed contention at its ends."""
    machine = priced.machine
    steps = np.full((2, len(Uncertainty._fields)), priced.step_s)
    for row, sign in enumerate((1, -1)):
        for column, factors in enumerate(_factors(errors, machine, sign)):
            if any(factor != 1 for factor in factors):
                steps[row, column] = price(schedule, machine, factors).step_s
    return steps


def _factors(errors: Uncertainty, machine: Machine, sign: int) -> tuple[Factors, ...]:
    """What each uncertainty multiplies.

    A slower machine makes collectives slower too, and those on an emulated link by less (``EMULATED_LINK_SHARE``).
    Without overlap tables the times of collectives beside computation follow from those alone.
    """
    speed, compute, network = (_power(sign * error) for error in (errors.speed, errors.compute, errors.network))
    overlapped, loss = _power(sign * errors.overlapped), _power(sign * errors.loss)
    if errors.overlapped and machine.contention and "contention" in machine.assumed:
        overlapped = CONTENTION_ENDS[sign < 0] / machine.contention
    of_network = speed**EMULATED_LINK_SHARE if machine.emulated_network else speed
    return (
        Factors(compute=speed, network=of_network, overlapped=speed, loss=speed),
        Factors(compute=compute),
        Factors(network=network, overlapped=1.0 if machine.overlap else network),
        Factors(overlapped=overlapped),
        Factors(loss=loss),
        Factors(overhead=_power(sign * errors.overhead)),
        Factors(fixed_share=_power(sign * errors.fixed_share)),
    )
