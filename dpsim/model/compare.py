"""Comparisons of a prediction: with the nulls, and with the same plan under other overlap mechanisms."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Executor

import msgspec

from dpsim.launch.workers import in_order
from dpsim.machine import Machine
from dpsim.model.cost import nearest_line
from dpsim.model.prices import FREE_NETWORK
from dpsim.model.step import Prediction, price, scheduled
from dpsim.plan import OVERLAPS, Plan
from dpsim.schedule import COMMUNICATION_LANE
from dpsim.workload import Workload

LEAST_GAIN = 0.03


def nulls(workload: Workload, machine: Machine, plan: Plan) -> dict[str, tuple[float, float]]:
    """name -> (step_s, exposed communication s) of the predictors that a model must beat.

    perfect_scaling          the single-device step of the same global batch over n, nothing exposed
    alpha_beta_no_overlap    computation on n devices + the sum over buckets of alpha + beta bytes, all exposed
    largest_bucket           the model's own prediction at one bucket a step
    free_communication       computation on n devices, as profiled, and communication that takes no time
    nothing_hidden           the same and all communication, none of it during computation; where the plan overlaps,
                             for without overlap it is the prediction itself
    """
    single = _predicted(workload, machine, plan.on_one_device())
    without = msgspec.structs.replace(plan, overlap="off")
    priced = price(scheduled(workload, machine, without), machine)
    off, events = priced.prediction, priced.timeline()
    sizes = [size for size in events.size_bytes[events.lane == COMMUNICATION_LANE].tolist() if size]
    alpha_s, beta = nearest_line(machine, machine.priced(plan.collective))
    exposed_s = float(sum(alpha_s + beta * size for size in sizes))
    one_bucket = msgspec.structs.replace(plan, fusion_rule="one", fusion_threshold_bytes=None)
    largest = _predicted(workload, machine, one_bucket)
    baselines = {
        "perfect_scaling": (single.step_s / plan.devices, 0.0),
        "alpha_beta_no_overlap": (off.step_s - off.exposed_communication_s + exposed_s, exposed_s),
        "largest_bucket": (largest.step_s, largest.exposed_communication_s),
        "free_communication": (price(scheduled(workload, machine, without), machine, FREE_NETWORK).step_s, 0.0),
    }
    if plan.overlap != "off":
        baselines["nothing_hidden"] = (off.step_s, off.exposed_communication_s)
    return baselines


def _predicted(workload: Workload, machine: Machine, plan: Plan) -> Prediction:
    """The predicted step, without its interval."""
    return price(scheduled(workload, machine, plan), machine).prediction


def _step_s(workload: Workload, machine: Machine, overlap: str, plan: Plan) -> float:
    overlapped = Plan(**(msgspec.structs.asdict(plan) | {"overlap": overlap}))
    return price(scheduled(workload, machine, overlapped), machine).step_s


def choose_overlap(
    workload: Workload,
    machine: Machine,
    plans: Sequence[Plan],
    mechanisms: Sequence[str] | None = None,
    executor: Executor | None = None,
) -> tuple[str, dict[str, float]]:
    """(the mechanism recommended for all ``plans``, every mechanism's seconds per step).

    Plans that are compared with each other are compared under one mechanism. Its seconds are those of the fastest plan
    of each device count or layout, averaged over these; see ``recommended`` for the choice. Plans of one device do not
    count: ``("off", {})`` where there are no others.

    Without ``mechanisms`` they are ``known_mechanisms``. The workers of an ``executor`` price the plans.
    """
    on_several = [plan for plan in plans if plan.devices > 1]
    if not on_several:
        return "off", {}
    ordered = known_mechanisms(machine, on_several) if mechanisms is None else mechanisms
    ordered = sorted(ordered, key=lambda name: OVERLAPS.index(name) if name in OVERLAPS else -1)
    steps = {name: _fastest(workload, machine, on_several, name, executor) for name in ordered}
    return recommended(steps), steps


def chosen_overlap(
    workload: Workload, machine: Machine, plans: Sequence[Plan], executor: Executor | None = None
) -> str:
    """The mechanism of ``choose_overlap``, without pricing the plans where the machine knows only one."""
    on_several = [plan for plan in plans if plan.devices > 1]
    known = known_mechanisms(machine, on_several) if on_several else ["off"]
    return choose_overlap(workload, machine, on_several, known, executor)[0] if len(known) > 1 else known[0]


def known_mechanisms(machine: Machine, plans: Sequence[Plan]) -> Sequence[str]:
    """Return off, inline and the overlaps that the machine has tables of for the algorithms of these plans.

    A machine without any overlap table (published figures, GPUs) is assumed to overlap at no cost: ``thread`` alone.
    """
    if not machine.overlap:
        return ["thread"]
    algorithms = {machine.priced(plan.collective).algorithm for plan in plans}
    measured = {table.overlap for table in machine.overlap if table.algorithm in algorithms}
    return [name for name in OVERLAPS if name in {"off", "inline", *measured}]


def _fastest(
    workload: Workload, machine: Machine, plans: Sequence[Plan], overlap: str, executor: Executor | None
) -> float:
    """Mean over device counts and layouts of their fastest plan's seconds per step."""
    fastest: dict[tuple[int, str], float] = {}
    steps = in_order(executor, functools.partial(_step_s, workload, machine, overlap), plans)
    for plan, step_s in zip(plans, steps, strict=True):
        where = (plan.devices, plan.layout)
        fastest[where] = min(step_s, fastest.get(where, step_s))
    return sum(fastest.values()) / len(fastest)


def recommended(steps: dict[str, float]) -> str:
    """The mechanism to take, given every mechanism's predicted step.

    It is the mechanism with the lowest predicted step if that is more than ``LEAST_GAIN`` below ``off``'s; else
    ``off``: overlap can cost on shared cores, and a gain within the calibration's uncertainty is none.
    """
    best = min(steps, key=lambda name: steps[name])
    return "off" if "off" in steps and steps[best] > (1 - LEAST_GAIN) * steps["off"] else best
