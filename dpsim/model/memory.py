"""What a plan needs of each device's memory, by part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun
from dpsim.fusion_rules import FUSION_RULES
from dpsim.kernels.allreduce.shards import largest_shard
from dpsim.machine import Machine
from dpsim.model.prices import local_share
from dpsim.model.step import scheduled
from dpsim.plan import Plan
from dpsim.schedule import FORWARD_EVENT, RECEIVE_EVENT, RECOMPUTE_EVENT, Schedule
from dpsim.units import ITEM_BYTES
from dpsim.workload import Layer, Workload


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
    (``Schedule.parameter_slots``, ``gradient_slots``); dpsim's own runtime has log2 m more arrays of gradients for the
    sums of m micro-batches along a tree. slots: the workload's ``optimizer_slots``, or else those of the
    plan's optimizer (SGD and LARS 1, AdamW 2). S: what a slot has, all parameters or the shards of a sharded schedule.
    A: what a micro-batch takes on the device with the most samples, times the micro-batches in flight
    (``Schedule.stashes``), and what is received for them from other classes; a class that computes forwards again
    keeps what each of these enters and leaves it with, and all of one alone. Of a script whose steps were weighed,
    A is what its peak has beside the other parts, in an update too. Activations are unknown where no layer states any.
    Of a script with ``fully_shard``, P and G are shards of their own types (G all gradients as they are reduced, where
    micro-batches are reduced together), and the buffers are what is gathered at once, in the type that it is gathered
    in: what stays until backward, and the largest other unit; with micro-batches a unit's gradients too. Buffers: an
    allreduce needs room for one bucket more than the gradients themselves, the largest (Horovod: its fusion buffer, the
    threshold or all gradients, whichever is less; DDP, of a script whose steps were weighed: all of its buckets, or
    none where gradients are views of them). Every class is taken to have all other state.
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
    own = np.array(schedule.buckets_of(rank_class), np.int64)
    sizes, shards = schedule.bucket_size_bytes[own], _shard_bytes(schedule, own)
    total = int(sizes.sum())

    def in_slots(slots: int) -> int:
        return shards + sum(int(sizes[slot::slots].max()) for slot in range(min(slots, len(sizes)))) if slots else total

    buffers = 0
    if plan.data_devices > 1 and total:
        buffers = int(sizes.max())
        if FUSION_RULES.find(plan.fusion_rule).while_running:
            buffers = max(buffers, int(min(plan.threshold_bytes, total)))
        elif _by_ddp(schedule):
            buffers = 0 if workload.gradient_memory == "buckets" else total
    by_fsdp = schedule.gathers_before_use and workload.ddp is not None and bool(workload.ddp.units)
    if by_fsdp:
        total, buffers = shards, _gathered(schedule)
        if plan.accumulate > 1:  # the gradients of a unit are there twice, until they are added
            buffers += int(schedule.size_bytes[schedule.gradient_collectives].max())
    partial_sums = math.ceil(math.log2(plan.accumulate)) if _knows_runtime(workload) else 0
    slots = len(plan.optimizer.slots) if workload.optimizer_slots is None else workload.optimizer_slots
    gradients = in_slots(schedule.gradient_slots) + partial_sums * total
    if by_fsdp and len(workload.reducing(plan.accumulate)) < plan.accumulate:
        gradients = int(schedule.size_bytes[schedule.gradient_collectives].sum())
    return {
        "parameters": in_slots(schedule.parameter_slots) + workload.state_bytes,
        "gradients": gradients,
        "optimizer_state": slots
        * (max(schedule.owned_bytes) if schedule.owners else shards if schedule.sharded else total),
        "activations": _activations(schedule, rank_class, gradients + (0 if by_fsdp else buffers)),
        "communication_buffers": buffers,
    }


def _activations(schedule: Schedule, rank_class: int, backward_bytes: int) -> int | None:
    """The bytes that micro-batches take: what layers keep until backward, or work in, and what is received for them.

    ``backward_bytes`` are those of gradients and of their collectives. An update may work in more.

    Where the workload knows what dpsim's own runtime allocates (``work_bytes``), it is that.
    ``None`` where no layer states anything.
    """
    layers = schedule.workload.layers
    of_class = schedule.rank_class == rank_class
    own = [layers[number] for number in np.unique(schedule.layer[of_class & (schedule.kind == FORWARD_EVENT)])]
    samples, stash = math.ceil(local_share(schedule.plan)), schedule.stashes[rank_class]
    if _knows_runtime(schedule.workload):
        taken = sum(layer.work_bytes + samples * layer.work_bytes_per_sample for layer in own)
    elif any(layer.activation_bytes_per_sample for layer in layers):
        taken = _kept(schedule, own, samples, backward_bytes)
    else:
        return None
    received = _largest_messages(schedule, rank_class)
    entered = sum(size for sender, size in received.items() if sender < rank_class)
    messages = stash * entered + sum(size for sender, size in received.items() if sender > rank_class)
    if not np.any(of_class & (schedule.kind == RECOMPUTE_EVENT)):
        return max(int(math.ceil(stash * taken) + messages), _updating(schedule), _whole_later(schedule))
    inputs = entered + samples * own[-1].output_bytes_per_sample
    return int(math.ceil(taken + stash * inputs) + messages)


def _gathered(schedule: Schedule) -> int:
    """The bytes of what a script with ``fully_shard`` has gathered at once, as it gathers it."""
    gathers = schedule.parameter_collectives
    units, again = np.unique(schedule.bucket[gathers][schedule.micro_batch[gathers] == 0], return_counts=True)
    size_bytes = _unit_bytes(schedule)
    kept, others = ([size_bytes[unit] for unit in which.tolist()] for which in (units[again == 1], units[again > 1]))
    return int(sum(kept) + max(others, default=0))


def _unit_bytes(schedule: Schedule) -> dict[int, int]:
    """The bytes of each unit, as it is gathered."""
    gathers = schedule.parameter_collectives
    return dict(zip(schedule.bucket[gathers].tolist(), schedule.size_bytes[gathers].tolist(), strict=True))


def _whole_later(schedule: Schedule) -> int:
    """What backward leaves whole of a script's units, beside those that are whole before: the activations are gone."""
    ddp = schedule.workload.ddp
    if ddp is None or schedule.plan.accumulate == 1 or all(unit.reshard_after_backward for unit in ddp.units):
        return 0
    return max(sum(_unit_bytes(schedule).values()) - _gathered(schedule), 0) if schedule.gathers_before_use else 0


def _by_ddp(schedule: Schedule) -> bool:
    """Whether DDP trains a script whose steps were weighed."""
    return bool(schedule.workload.gradient_memory) and schedule.classes == 1 and not schedule.sharded


def _kept(schedule: Schedule, layers: Sequence[Layer], samples: int, backward_bytes: int) -> float:
    """What layers keep until backward, and what a script's step works in beside its gradients.

    Where these are released after an update, it is what comes on top of all gradients, of which those of later layers
    take the place of what these kept; shards have room for all when backward begins. With several micro-batches DDP has
    the largest gradient twice, until it is added.
    """
    workload = schedule.workload
    activations = np.array([layer.work_bytes + samples * layer.activation_bytes_per_sample for layer in layers])
    if schedule.sharded and schedule.classes == 1 and schedule.plan.accumulate == 1:
        return max(float(activations.sum()) - backward_bytes * (workload.gradient_memory == "released"), 0.0)
    if not _by_ddp(schedule):
        return float(activations.sum())
    if schedule.plan.accumulate > 1:
        return float(activations.sum()) + max((tensor.size_bytes for tensor in workload.tensors), default=0)
    released = workload.gradient_memory == "released"
    gradients = np.array([released * sum(tensor.size_bytes for tensor in layer.tensors) for layer in layers])
    return max(float(np.max(np.cumsum(activations - gradients))), 0.0)


def _updating(schedule: Schedule) -> int:
    """What an update works in beside gradients and state: for its shard where a rank updates one."""
    update_bytes = schedule.workload.update_bytes if schedule.classes == 1 else 0
    if schedule.owners:
        return update_bytes * max(schedule.owned_bytes) // max(sum(schedule.owned_bytes), 1)
    return update_bytes // schedule.plan.shard_devices if schedule.sharded else update_bytes


def _knows_runtime(workload: Workload) -> bool:
    """Whether a workload knows what dpsim's own runtime allocates for its layers."""
    return any(layer.work_bytes_per_sample for layer in workload.layers)


def _largest_messages(schedule: Schedule, rank_class: int) -> dict[int, int]:
    """The size of the largest message that a class receives from each other one."""
    largest: dict[int, int] = {}
    for receive in np.flatnonzero((schedule.kind == RECEIVE_EVENT) & (schedule.rank_class == rank_class)).tolist():
        sender = int(schedule.rank_class[schedule.peer[receive]])
        largest[sender] = max(largest.get(sender, 0), int(schedule.size_bytes[receive]))
    return largest


def _shard_bytes(schedule: Schedule, buckets: NDArray[np.int64]) -> int:
    """The bytes of one array of optimizer state: the largest shard of each of these buckets."""
    tensors, devices = schedule.workload.tensors, schedule.plan.shard_devices
    firsts = (tensors[int(schedule.tensor_order[start])] for start in schedule.bucket_start[buckets])
    itemsizes = [ITEM_BYTES[tensor.dtype] for tensor in firsts]
    sizes = schedule.bucket_size_bytes[buckets].tolist()
    return sum(largest_shard(size // item, devices) * item for size, item in zip(sizes, itemsizes, strict=True))
