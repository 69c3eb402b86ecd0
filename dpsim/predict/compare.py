"""What a prediction is compared with: the nulls, and the same plan under other overlap mechanisms."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dpsim.machine import Machine
from dpsim.plan import OVERLAPS, Plan
from dpsim.predict.cost import alpha_beta
from dpsim.predict.step import predict, timeline
from dpsim.schedule import COMMUNICATION
from dpsim.workload import Workload

LEAST_GAIN = 0.03


def nulls(workload: Workload, machine: Machine, plan: Plan) -> dict[str, tuple[float, float]]:
    """name -> (step_s, exposed communication s) of the predictors that a model must beat.

    perfect_scaling          the single-device step of the same global batch over n, nothing exposed
    alpha_beta_no_overlap    computation on n devices + the sum over buckets of alpha + beta bytes, all exposed
    largest_bucket           the model's own prediction at one bucket a step
    """
    single = predict(workload, machine, msgspec.structs.replace(plan, devices=1, layout=""))
    without = msgspec.structs.replace(plan, overlap="off")
    off = predict(workload, machine, without)
    events = timeline(workload, machine, without)
    algorithm = machine.priced(plan.algorithm, plan.devices, plan.layout)
    alpha_s, beta = alpha_beta(machine, algorithm, plan.devices, plan.priced_wire_dtype, plan.layout)
    sizes = events.size_bytes[events.lane == COMMUNICATION]
    exposed_s = float(sum(alpha_s + beta * size for size in sizes.tolist() if size))
    one = predict(workload, machine, msgspec.structs.replace(plan, fusion_rule="one", fusion_threshold_bytes=None))
    return {
        "perfect_scaling": (single.step_s / plan.devices, 0.0),
        "alpha_beta_no_overlap": (off.step_s - off.exposed_communication_s + exposed_s, exposed_s),
        "largest_bucket": (one.step_s, one.exposed_communication_s),
    }


def choose_overlap(
    workload: Workload, machine: Machine, plan: Plan, mechanisms: Sequence[str] | None = None
) -> tuple[str, dict[str, float]]:
    """(the recommended mechanism, every mechanism's predicted step_s).

    Recommended is the mechanism with the lowest predicted step if that is more than ``LEAST_GAIN`` below ``off``'s;
    else ``off``: overlap can cost on shared cores, and a gain within the calibration's uncertainty is none.

    Without ``mechanisms`` they are off, inline and those that the machine has overlap tables of for this algorithm and
    device count. A machine without any such table (published figures, GPUs) is taken to overlap freely: ``thread``."""
    if mechanisms is None:
        asked = (machine.priced(plan.algorithm, plan.devices, plan.layout), plan.devices, plan.layout)
        measured = {t.overlap for t in machine.overlap if (t.algorithm, t.devices, t.layout) == asked}
        if not machine.overlap and plan.devices > 1:
            measured = {"thread"}
        mechanisms = ["off", "inline", *measured]
    ordered = sorted(mechanisms, key=lambda name: OVERLAPS.index(name) if name in OVERLAPS else -1)
    steps = {
        name: predict(workload, machine, Plan(**(msgspec.structs.asdict(plan) | {"overlap": name}))).step_s
        for name in ordered
    }
    return recommended(steps), steps


def recommended(steps: dict[str, float]) -> str:
    """The mechanism to take, given every mechanism's predicted step: see ``choose_overlap``."""
    best = min(steps, key=lambda name: steps[name])
    return "off" if "off" in steps and steps[best] > (1 - LEAST_GAIN) * steps["off"] else best
