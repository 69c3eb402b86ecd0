"""What a plan needs of each device's memory, by part."""

from __future__ import annotations

import math

from dpsim.codec import Noun
from dpsim.fusion_rules import FUSION_RULES
from dpsim.machine import Machine
from dpsim.plan import Plan
from dpsim.predict.step import local_share, scheduled
from dpsim.workload import Workload


class Memory(Noun, frozen=True):
    """Bytes per device. ``activations`` is ``None`` where the workload states none; then ``total`` is without them.

    ``fits`` compares with the machine's ``memory_bytes``; ``None`` where that is not stated, or where it is not known
    because the activations are not.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int | None
    communication_buffers: int
    total: int
    fits: bool | None

    def parts(self) -> dict[str, int | None]:
        """Bytes by part, without the total."""
        names = ("parameters", "gradients", "optimizer_state", "activations", "communication_buffers")
        return {name: getattr(self, name) for name in names}


def memory(workload: Workload, plan: Plan, machine: Machine) -> Memory:
    """total = P + state + P + slots P + b A + the largest bucket.

    P: gradient bytes (parameters have the same), slots: the workload's ``optimizer_slots``, or else those of the
    plan's optimizer (SGD 1, AdamW 2), b: samples of a micro-batch on the device with the most, A: activation bytes
    per sample (those of all layers are kept until backward). Activations are unknown where no layer states any.
    An allreduce needs room for one bucket more than the gradients themselves: the largest (Horovod: its fusion buffer,
    the threshold or all gradients, whichever is less).
    """
    gradients = workload.gradient_bytes
    samples = math.ceil(local_share(plan))
    bytes_per_sample = sum(layer.activation_bytes_per_sample for layer in workload.layers)
    activations = math.ceil(samples * bytes_per_sample) if bytes_per_sample else None
    buffers = 0
    if plan.devices > 1 and gradients:
        while_running = FUSION_RULES.find(plan.fusion_rule).while_running
        largest = int(scheduled(workload, machine, plan).bucket_size_bytes.max())
        buffers = max(largest, int(min(plan.threshold_bytes, gradients))) if while_running else largest
    slots = len(plan.optimizer.slots) if workload.optimizer_slots is None else workload.optimizer_slots
    parameters, optimizer_state = gradients + workload.state_bytes, slots * gradients
    total = parameters + gradients + optimizer_state + (activations or 0) + buffers
    fits: bool | None = total <= machine.memory_bytes
    if fits and (activations is None or math.isinf(machine.memory_bytes)):
        fits = None
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer_state=optimizer_state,
        activations=activations,
        communication_buffers=buffers,
        total=total,
        fits=fits,
    )
