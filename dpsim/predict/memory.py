"""What a plan needs of each device's memory, by part."""

from __future__ import annotations

import math

import numpy as np

from dpsim.codec import Noun
from dpsim.fusion_rules import FUSION_RULES
from dpsim.kernels.allreduce.shards import largest_shard
from dpsim.machine import Machine
from dpsim.plan import Plan
from dpsim.predict.prices import local_share
from dpsim.predict.step import scheduled
from dpsim.schedule import Schedule
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
    """total = P + state + P + slots S + b A + the largest bucket.

    P: gradient bytes (parameters have the same), slots: the workload's ``optimizer_slots``, or else those of the
    plan's optimizer (SGD and LARS 1, AdamW 2), S: what a slot has, P or with zero1 the largest shard of every bucket
    (``dpsim.kernels.allreduce.shards``), b: samples of a micro-batch on the device with the most, A: activation bytes
    per sample (those of all layers are kept until backward). Activations are unknown where no layer states any.
    An allreduce needs room for one bucket more than the gradients themselves: the largest (Horovod: its fusion buffer,
    the threshold or all gradients, whichever is less).
    """
    gradients = workload.gradient_bytes
    samples = math.ceil(local_share(plan))
    bytes_per_sample = sum(layer.activation_bytes_per_sample for layer in workload.layers)
    activations = math.ceil(samples * bytes_per_sample) if bytes_per_sample else None
    buffers, slot_bytes = 0, gradients
    if plan.devices > 1 and gradients:
        while_running = FUSION_RULES.find(plan.fusion_rule).while_running
        schedule = scheduled(workload, machine, plan)
        largest = int(schedule.bucket_size_bytes.max())
        slot_bytes = _shard_bytes(schedule) if schedule.sharded else gradients
        buffers = max(largest, int(min(plan.threshold_bytes, gradients))) if while_running else largest
    slots = len(plan.optimizer.slots) if workload.optimizer_slots is None else workload.optimizer_slots
    parameters, optimizer_state = gradients + workload.state_bytes, slots * slot_bytes
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


def _shard_bytes(schedule: Schedule) -> int:
    """The bytes of one array of optimizer state: the largest shard of each bucket."""
    tensors, devices = schedule.workload.tensors, schedule.plan.devices
    firsts = (tensors[int(schedule.tensor_order[start])] for start in schedule.bucket_start[:-1])
    itemsizes = [np.dtype(tensor.dtype).itemsize for tensor in firsts]
    sizes = schedule.bucket_size_bytes.tolist()
    return sum(largest_shard(size // item, devices) * item for size, item in zip(sizes, itemsizes, strict=True))
