"""ZeRO-3 (FSDP): a rank keeps its shard of parameters, gradients and optimizer state, and gathers units to compute.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 3;
Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.lowering import data_parallel
from dpsim.lowering.buckets import Costs, fused
from dpsim.lowering.computation import computation_of
from dpsim.lowering.fusion import Buckets, Ints
from dpsim.lowering.zero2 import Gather, interleaved
from dpsim.plan import Plan
from dpsim.schedule import BACKWARD_EVENT, FORWARD_EVENT, Schedule
from dpsim.strategy import Zero3
from dpsim.workload import Workload


class _Use(NamedTuple):
    """Neighbouring computations of one unit: the first and the last, as rows of the computation."""

    unit: int
    first: int
    last: int


def lower(
    workload: Workload,
    plan: Plan,
    ready_s: NDArray[np.float64] | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
) -> Schedule:
    """The operations of one step (see ``dpsim.lowering.lower``), in the order of the arrays:

    the computation of data parallelism, with all-gathers of units before it needs them and, in the last micro-batch,
    each unit's reduce-scatter behind the backward that completes it; the sum of batch norm's leaf statistics; the
    agreement of the ranks; the update. A unit is a bucket of whole layers: the bucket that the fusion rule makes, and
    what is left of the layer that it ends in.

    A gather is needed by the first computation of its unit, stands ``prefetch`` units before it, and begins when the
    unit before these is done: the computation of ``prefetch`` units runs beside it. With ``reshard`` and more than
    prefetch + 1 units, these are the ``parameter_slots``: unit u is in slot u modulo that number, where it stays until
    another unit of its slot is gathered. So units at the turn from forward to backward, or to the next micro-batch,
    need no second gather. Otherwise every unit is gathered once a step. In a step of one micro-batch there are as many
    slots of gradients.

    On one device it is the schedule of data parallelism. Raises ``ConfigError`` for a layer with several dtypes.
    """
    costs = Costs(ready_s, alpha_s, beta_s_per_byte)
    if plan.devices == 1:
        return data_parallel.lower(workload, plan, *costs)
    strategy = cast(Zero3, plan.parallelism)
    units = Buckets.at(workload, _whole_layers(workload, fused(workload, plan, costs)))
    count = len(units.size_bytes)
    slots = strategy.prefetch + 1 if strategy.prefetch + 1 < count else 0
    parameter_slots = slots if strategy.reshard else 0
    return interleaved(
        workload,
        plan,
        units,
        gradient_slots=slots if plan.accumulate == 1 else 0,
        parameter_slots=parameter_slots,
        gathers=_gathers(_uses(workload, plan, units), strategy.prefetch, parameter_slots or count),
    )


def _whole_layers(workload: Workload, start: Ints) -> Ints:
    """The starts of buckets, each moved to the next layer: a bucket ends with the layer that it ends in."""
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


def _uses(workload: Workload, plan: Plan, units: Buckets) -> list[_Use]:
    """The uses of units by all micro-batches, in order; two neighbours are of different units."""
    unit_of = np.full(len(workload.layers), -1)
    unit_of[workload.ready_order.layer] = np.repeat(np.arange(len(units.size_bytes)), np.diff(units.start))
    columns = computation_of(workload, plan.accumulate, plan.batch_norm).columns
    rows = np.flatnonzero(np.isin(columns.kind, (FORWARD_EVENT, BACKWARD_EVENT)))
    of_row = zip(unit_of[columns.layer[rows]].tolist(), rows.tolist(), strict=True)
    with_unit = ((unit, row) for unit, row in of_row if unit >= 0)
    uses = []
    for unit, group in itertools.groupby(with_unit, key=lambda pair: pair[0]):
        own = [row for _, row in group]
        uses.append(_Use(unit, own[0], own[-1]))
    return uses


def _gathers(uses: list[_Use], prefetch: int, slots: int) -> list[Gather]:
    """The gathers of the units that are not in their slot when they are used."""
    resident: dict[int, int] = {}
    gathers = []
    for place, use in enumerate(uses):
        if resident.get(use.unit % slots) == use.unit:
            continue
        resident[use.unit % slots] = use.unit
        begin = place - prefetch
        after = uses[begin - 1].last if begin > 0 else 0
        gathers.append(Gather(use.unit, before=uses[max(begin, 0)].first, after=after, needed_by=use.first))
    return gathers
