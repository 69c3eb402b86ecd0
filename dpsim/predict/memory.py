"""What a plan needs of each device's memory, by part."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun
from dpsim.fusion_rules import FUSION_RULES
from dpsim.kernels.allreduce.shards import largest_shard
from dpsim.machine import Machine
from dpsim.plan import Plan
from dpsim.predict.prices import local_share
from dpsim.predict.step import scheduled
from dpsim.schedule import FORWARD_EVENT, RECEIVE_EVENT, RECOMPUTE_EVENT, Schedule
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
    """total = P + state + G + slots S + A + buffers, of the rank class that needs most.

    P and G are the bytes of the class's parameters and of its gradients: all of them, or its shard of every bucket
    (``dpsim.kernels.allreduce.shards``) and the largest bucket of each slot, where a schedule has slots
    (``Schedule.parameter_slots``, ``gradient_slots``). slots: the workload's ``optimizer_slots``, or else those of the
    plan's optimizer (SGD and LARS 1, AdamW 2). S: what a slot has, all parameters or the shards of a sharded schedule.
    A: what a micro-batch keeps until backward on the device with the most samples, times the micro-batches in flight
    (``Schedule.stashes``); a class that computes forwards again keeps what each of these enters it with, and all of one
    alone. Activations are unknown where no layer states any. Buffers: an allreduce needs room for one bucket more than
    the gradients themselves, the largest (Horovod: its fusion buffer, the threshold or all gradients, whichever is
    less), and a class for the largest message from each other one. Every class is taken to have all other state.
    """
    schedule = scheduled(workload, machine, plan)
    classes = [_of_class(schedule, rank_class) for rank_class in range(schedule.classes)]
    parts = max(classes, key=lambda each: sum(value or 0 for value in each.values()))
    total = sum(value or 0 for value in parts.values())
    fits: bool | None = total <= machine.memory_bytes
    if fits and (parts["activations"] is None or math.isinf(machine.memory_bytes)):
        fits = None
    return Memory(**parts, total=total, fits=fits)  # type: ignore[arg-type]


def _of_class(schedule: Schedule, rank_class: int) -> dict[str, int | None]:
    """Bytes by part of ``Memory`` on a rank of a class."""
    workload, plan = schedule.workload, schedule.plan
    own = np.flatnonzero(schedule.bucket_class == rank_class)
    sizes, shards = schedule.bucket_size_bytes[own], _shard_bytes(schedule, own)
    whole = int(sizes.sum())

    def in_slots(slots: int) -> int:
        return shards + sum(int(sizes[slot::slots].max()) for slot in range(min(slots, len(sizes)))) if slots else whole

    buffers = 0
    if plan.data_devices > 1 and whole:
        buffers = int(sizes.max())
        if FUSION_RULES.find(plan.fusion_rule).while_running:
            buffers = max(buffers, int(min(plan.threshold_bytes, whole)))
    slots = len(plan.optimizer.slots) if workload.optimizer_slots is None else workload.optimizer_slots
    return {
        "parameters": in_slots(schedule.parameter_slots) + workload.state_bytes,
        "gradients": in_slots(schedule.gradient_slots),
        "optimizer_state": slots * (shards if schedule.sharded else whole),
        "activations": _activations(schedule, rank_class),
        "communication_buffers": buffers + sum(_largest_messages(schedule, rank_class).values()),
    }


def _activations(schedule: Schedule, rank_class: int) -> int | None:
    """The bytes that micro-batches keep until backward; ``None`` where no layer states any."""
    layers = schedule.workload.layers
    if not any(layer.activation_bytes_per_sample for layer in layers):
        return None
    of_class = schedule.rank_class == rank_class
    own = np.unique(schedule.layer[of_class & (schedule.kind == FORWARD_EVENT)]).tolist()
    samples = math.ceil(local_share(schedule.plan))
    kept: int = math.ceil(samples * sum(layers[number].activation_bytes_per_sample for number in own))
    stash: int = schedule.stashes[rank_class]
    if not np.any(of_class & (schedule.kind == RECOMPUTE_EVENT)):
        return stash * kept
    messages = _largest_messages(schedule, rank_class)
    return kept + stash * sum(size for sender, size in messages.items() if sender < rank_class)


def _largest_messages(schedule: Schedule, rank_class: int) -> dict[int, int]:
    """The size of the largest message that a class receives from each other one."""
    largest: dict[int, int] = {}
    for receive in np.flatnonzero((schedule.kind == RECEIVE_EVENT) & (schedule.rank_class == rank_class)).tolist():
        sender = int(schedule.rank_class[schedule.peer[receive]])
        largest[sender] = max(largest.get(sender, 0), int(schedule.size_bytes[receive]))
    return largest


def _shard_bytes(schedule: Schedule, buckets: NDArray[np.int64]) -> int:
    """The bytes of one array of optimizer state: the largest shard of each of these buckets."""
    tensors, devices = schedule.workload.tensors, schedule.plan.data_devices
    firsts = (tensors[int(schedule.tensor_order[start])] for start in schedule.bucket_start[buckets])
    itemsizes = [np.dtype(tensor.dtype).itemsize for tensor in firsts]
    sizes = schedule.bucket_size_bytes[buckets].tolist()
    return sum(largest_shard(size // item, devices) * item for size, item in zip(sizes, itemsizes, strict=True))
