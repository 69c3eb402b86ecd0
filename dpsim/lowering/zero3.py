"""ZeRO-3 (FSDP): a rank keeps its shard of parameters, gradients and optimizer state, and gathers units to compute.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 3;
Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.lowering import data_parallel, zero1
from dpsim.lowering.buckets import Costs, fused
from dpsim.lowering.computation import computation_of
from dpsim.lowering.fusion import Buckets, Ints
from dpsim.lowering.interleaved import Gather, interleaved
from dpsim.plan import Plan
from dpsim.schedule import (
    ALL_GATHER_EVENT,
    ALLREDUCE_EVENT,
    BACKWARD_EVENT,
    FORWARD_EVENT,
    REDUCE_SCATTER_EVENT,
    Schedule,
)
from dpsim.strategy import Zero3
from dpsim.units import ITEM_BYTES
from dpsim.workload import Workload


class _Use(NamedTuple):
    """Neighbouring computations of one unit: the first and the last, as rows of the computation."""

    unit: int
    first: int
    last: int
    micro_batch: int
    backward: bool


def lower(
    workload: Workload,
    plan: Plan,
    ready_s: NDArray[np.float64] | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
) -> Schedule:
    """Return the operations of one step (see ``dpsim.lowering.lower``), in the order of the arrays:

    the computation of data parallelism, with all-gathers of units before it needs them and, in the last micro-batch,
    each unit's reduce-scatter behind the backward that completes it, and with several replicas the allreduce of its
    shards; the sum of batch norm's leaf statistics; the
    agreement of the ranks; the update. A unit is a bucket of whole layers: the bucket that the fusion rule makes, and
    what is left of the layer that it ends in.

    A gather is needed by the first computation of its unit, stands ``prefetch`` units before it, and begins when the
    unit before these is done: the computation of ``prefetch`` units runs meanwhile. With ``reshard`` and more than
    prefetch + 1 units, these are the ``parameter_slots``: unit u is in slot u modulo that number, where it stays until
    another unit of its slot is gathered. So units at the turn from forward to backward, or to the next micro-batch,
    need no second gather. Otherwise every unit is gathered once a step. In a step of one micro-batch there are as many
    slots of gradients.

    Where the workload is that of a PyTorch script with ``fully_shard``, its units are layers: a unit is gathered once
    for each forward, and for each backward too where the script has it given up in between, even at the turn; where it
    is not given up after backward, for the first forward alone. All have memory of their own here, and the ranks do not
    agree that numbers are finite. Its collectives have the bytes that PyTorch sends: of the type that a policy gives
    them, of whole rows for every rank.

    On one device it is the schedule of data parallelism. Raises ``ConfigError`` for a layer with several dtypes.
    """
    costs = Costs(ready_s, alpha_s, beta_s_per_byte)
    if plan.devices == 1:
        return data_parallel.lower(workload, plan, *costs)
    strategy = cast(Zero3, plan.parallelism)
    units = Buckets.at(workload, _whole_layers(workload, fused(workload, plan, costs)))
    count = len(units.size_bytes)
    if workload.ddp is not None and workload.ddp.units:
        uses = _uses(workload, plan, units, by_pass=True)
        of_script = workload.ddp.units
        resharded = _joined(workload, [unit.reshard and strategy.reshard for unit in of_script], units)
        resharded_after_backward = _joined(workload, [unit.reshard_after_backward for unit in of_script], units)
        gathers = _gathers(_each_pass(uses, resharded, resharded_after_backward), strategy.prefetch)
        return _as_sent(interleaved(workload, plan, units, gathers=gathers))
    slots = strategy.prefetch + 1 if strategy.prefetch + 1 < count else 0
    parameter_slots = slots if strategy.reshard else 0
    return interleaved(
        workload,
        plan,
        units,
        gradient_slots=slots if plan.accumulate == 1 else 0,
        parameter_slots=parameter_slots,
        agreement=zero1.agreement_bytes(workload, plan.optimizer),
        gathers=_gathers(_slot_gathers(_uses(workload, plan, units), parameter_slots or count), strategy.prefetch),
    )


def _as_sent(schedule: Schedule) -> Schedule:
    """Return the schedule with the bytes of gathers and reduce-scatters as FSDP sends them.

    A parameter is cut along its first extent, which is padded to a multiple of the ranks.
    """
    tensors, devices, starts = schedule.workload.tensors, schedule.plan.shard_devices, schedule.bucket_start
    size_bytes = schedule.size_bytes.copy()
    for kind, dtypes, share in (
        (ALL_GATHER_EVENT, [each.gathered for each in tensors], 1),
        (REDUCE_SCATTER_EVENT, [each.reduced for each in tensors], 1),
        (ALLREDUCE_EVENT, [each.reduced for each in tensors], devices),
    ):
        sent = [each.padded(devices) // share * ITEM_BYTES[of] for each, of in zip(tensors, dtypes, strict=True)]
        of_bucket = np.add.reduceat(np.array(sent, np.int64)[schedule.tensor_order], starts[:-1])
        rows = schedule.kind == kind
        size_bytes[rows] = of_bucket[schedule.bucket[rows]]
    return replace(schedule, size_bytes=size_bytes)


def _whole_layers(workload: Workload, start: Ints) -> Ints:
    """Return the starts of buckets, each moved to the next layer: a bucket ends with the layer that it ends in."""
    layer = workload.ready_order.layer
    codes = workload.ready_order.dtype_code
    mixed = np.flatnonzero((np.diff(layer) == 0) & (np.diff(codes) != 0))
    if len(mixed):
        name = workload.layers[layer[mixed[0]]].name
        raise ConfigError(
            f"strategy zero3 for layer {name!r}, whose tensors have several dtypes",
            allowed="one dtype in each layer, since whole layers are gathered at once",
            remedy="choose another --strategy",
        )
    borders = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(np.diff(layer)) + 1, [len(layer)]])
    return np.unique(borders[np.searchsorted(borders, start)])


def _uses(workload: Workload, plan: Plan, units: Buckets, *, by_pass: bool = False) -> list[_Use]:
    """Return all uses of units, in order; two neighbours are of different units, or ``by_pass`` a forward and
    a backward.
    """
    unit_of = np.full(len(workload.layers), -1)
    unit_of[workload.ready_order.layer] = np.repeat(np.arange(len(units.size_bytes)), np.diff(units.start))
    columns = computation_of(workload, plan.accumulate, plan.batch_norm, distributed=plan.devices > 1).columns
    rows = np.flatnonzero(np.isin(columns.kind, (FORWARD_EVENT, BACKWARD_EVENT)))
    of_row = zip(unit_of[columns.layer[rows]].tolist(), rows.tolist(), strict=True)
    with_unit = ((unit, row) for unit, row in of_row if unit >= 0)
    uses = []
    backward = (columns.kind == BACKWARD_EVENT).tolist()
    for _, group in itertools.groupby(with_unit, key=lambda pair: (pair[0], by_pass and backward[pair[1]])):
        own = list(group)
        (unit, first), (_, last) = own[0], own[-1]
        uses.append(_Use(unit, first, last, int(columns.micro_batch[first]), backward[first]))
    return uses


def _slot_gathers(uses: list[_Use], slots: int) -> Iterator[tuple[_Use, bool]]:
    """Yield each use, and whether its unit is not in its slot then and must be gathered."""
    resident: dict[int, int] = {}
    for use in uses:
        yield use, resident.get(use.unit % slots) != use.unit
        resident[use.unit % slots] = use.unit


def _joined(workload: Workload, of_layers: Sequence[bool], units: Buckets) -> list[bool]:
    """Return what is so of each unit: of any of the script's units that a fusion rule joins to it."""
    joined: list[bool] = np.maximum.reduceat(np.array(of_layers)[workload.ready_order.layer], units.start[:-1]).tolist()
    return joined


def _each_pass(
    uses: list[_Use], resharded: list[bool], resharded_after_backward: list[bool]
) -> Iterator[tuple[_Use, bool]]:
    """Yield each use, and whether its unit is not whole then: it is the first in a forward, or in a backward after it
    was given up. One that is not given up after backward is whole from the second micro-batch's forward on.
    """
    gathered: set[tuple[int, bool, int]] = set()
    for use in uses:
        of_pass = use.micro_batch, use.backward, use.unit
        again = resharded if use.backward else resharded_after_backward
        first = not (use.backward or use.micro_batch)
        yield use, of_pass not in gathered and (first or again[use.unit])
        gathered.add(of_pass)


def _gathers(uses: Iterable[tuple[_Use, bool]], prefetch: int) -> list[Gather]:
    """Return the gathers of the uses that need one, ``prefetch`` uses before, but after the unit's last use."""
    gathers: list[Gather] = []
    before: list[_Use] = []
    used: dict[int, int] = {}
    for position, (use, needed) in enumerate(uses):
        before.append(use)
        begin = max(position - prefetch, used.get(use.unit, -1) + 1)
        used[use.unit] = position
        after = before[begin - 1].last if begin > 0 else 0
        if needed:
            gathers.append(Gather(use.unit, before=before[max(begin, 0)].first, after=after, needed_by=use.first))
    return gathers
