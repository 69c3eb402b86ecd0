"""The law of bits: from a Schedule, what decides the bits of a step, so that two plans can be compared before any runs.

Two things decide them: what each rank computes alone (``Work``), and the order in which every element of every
gradient is added over the ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpsim.comm.sum_orders import Summation, element_orders
from dpsim.dtypes import SIXTEEN_BITS
from dpsim.kernels.allreduce.expression import part, text
from dpsim.kernels.allreduce.orders import Order
from dpsim.memo import remember
from dpsim.schedule import Schedule
from dpsim.workload import Workload

Ranges = tuple[tuple[int, Order], ...]
"""The ends of ranges of a tensor's elements, and the order in which each is added over the ranks."""

MOST_RANKS = 64
"""Beyond so many ranks the steps of an algorithm are not executed on expressions."""


class Work(NamedTuple):
    """What a rank computes alone: the samples that it takes at once, and those that batch norm normalises together.

    ``training`` are the settings of a plan that make it another training: its batch, number formats and optimizer.
    With ``leaves`` the devices do not matter, and are 0. ``batch_norm`` is empty for a model without one. ``divided``
    is the strategy where devices compute different layers or parts of them.
    """

    leaves: int
    batch_norm: str
    devices: int
    accumulate: int
    global_batch: int
    divided: str
    training: tuple[object, ...]

    @property
    def local_batch(self) -> float:
        """The samples that a rank computes at once."""
        return self.global_batch / (self.devices * self.accumulate)


@dataclass(frozen=True)
class Bits:
    """What decides the bits of a plan's steps. Plans with equal ones have equal bits.

    ``orders`` are those of each tensor; None where they are not known beforehand: then ``scheme``, the buckets and what
    adds them, decides. ``repeatable`` is false where buckets, or what
    adds them, are decided while running and their order matters.
    """

    work: Work
    orders: Mapping[str, Ranges] | None
    scheme: tuple[object, ...]
    repeatable: bool = True
    digest_of_orders: bytes = b""

    @property
    def digest(self) -> bytes | None:
        """Equal where the law says that the bits are the same; None where no other step is known to have these."""
        if self.orders is None and not self.repeatable:
            return None
        return _digest(self.work, self.scheme if self.orders is None else self.digest_of_orders)

    def same(self, other: Bits) -> bool:
        """Return whether the law says that the bits are the same. If not they differ, but for chance."""
        return self.digest is not None and self.digest == other.digest


def _digest(*values: object) -> bytes:
    return hashlib.blake2b(repr(values).encode(), digest_size=16).digest()


def plan_bits(schedule: Schedule, *, shares_memory: bool = True) -> Bits:
    """Return what decides the bits of a schedule's plan; ``shares_memory``: its ranks are on one machine."""
    plan, workload = schedule.plan, schedule.workload
    batch_norm = plan.batch_norm if any(layer.batch_norm_channels for layer in workload.layers) else ""
    divided = plan.parallelism.text if plan.parallelism.classes > 1 else ""
    training = plan.wire_dtype, plan.compute_dtype, plan.optimizer
    if plan.leaves:
        return Bits(Work(plan.leaves, batch_norm, 0, 1, plan.global_batch, "", training), {}, ())
    work = Work(0, batch_norm, plan.data_devices, plan.accumulate, plan.global_batch, divided, training)
    how = Summation(
        algorithm=plan.algorithm,
        ranks=plan.data_devices,
        devices_a_node=plan.data_layout.of_a_node,
        kind="reduce-scatter" if schedule.sharded else "allreduce",
        replicas=plan.replicas,
        compressed=plan.wire_dtype in SIXTEEN_BITS,
        shares_memory=shares_memory,
    )
    buckets = tuple(schedule.bucket_tensors(bucket) for bucket in range(schedule.buckets))
    known = _orders(workload, how, buckets, schedule.dynamic) if plan.data_devices <= MOST_RANKS else None
    orders, digest = known or (None, b"")
    measured = plan.algorithm == "auto" and not shares_memory and plan.data_devices > 2
    return Bits(work, orders, (how, buckets), not (schedule.dynamic or measured), digest)


@remember
def _orders(
    workload: Workload, how: Summation, buckets: tuple[tuple[str, ...], ...], dynamic: bool
) -> tuple[dict[str, Ranges], bytes] | None:
    """(The order of each tensor, their digest); None where one is not known, or depends on buckets decided later."""
    elements = {tensor.name: tensor.elements for tensor in workload.tensors}
    orders: dict[str, Ranges] = {}
    for tensors in buckets:
        ranges = element_orders(how, sum(elements[name] for name in tensors))
        if ranges is None or (dynamic and len(ranges) > 1):
            return None
        first = 0
        for name in tensors:
            stop = first + elements[name]
            orders[name] = tuple(part(ranges, first, stop))
            first = stop
    return orders, _digest(sorted(orders.items()))


def letters(digests: Sequence[bytes | None]) -> list[str]:
    """Return A, B, ... for the digest of each: equal letters have equal bits."""
    keys = [object() if each is None else each for each in digests]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [letter(numbers[key]) for key in keys]


def letter(number: int) -> str:
    """Return A, B, ..., Z, AA, AB, ... for 0, 1, ..."""
    before, last = divmod(number, 26)
    return (letter(before - 1) if before else "") + chr(ord("A") + last)


def order_text(order: Order) -> str:
    """Return ``(0+1)+(2+3)``, and what of it is rounded to 16 bits."""
    rounded = f" of {', '.join(map(text, order.addends))} rounded to 16 bits" if order.addends else ""
    return text(order.expression) + rounded
