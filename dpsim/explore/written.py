"""The Schedules of a what-if page: steps divided among rank classes, which Python lowers and the page's engine walks.

A Schedule is written for a strategy and a number of micro-batches, before its buckets are decided: the engine fuses
them, so that one Schedule serves every fusion rule, threshold, network and number of devices. Its messages are written
for one sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dpsim.errors import ConfigError
from dpsim.lowering import lower
from dpsim.lowering.stages import stage_bounds
from dpsim.plan import Plan
from dpsim.schedule import SYNCHRONISE_EVENT, UPDATE_EVENT, Schedule
from dpsim.strategy import parse_strategy
from dpsim.workload import Workload

DIVIDED = (
    "pipeline",
    "pipeline:stages=4",
    "pipeline:stages=4,order=gpipe",
    "pipeline:stages=4,recompute=yes",
    "pipeline:shard=yes",
    "tensor",
    "tensor:parts=4",
    "tensor:shard=yes",
    "pipeline:parts=2",
)
"""The strategies of a page whose Schedules Python writes."""
MICRO_BATCHES = (1, 2, 4, 8, 16)
"""The micro-batches of a step for which it does."""
MOST_STAGED_LAYERS = 300
"""The layers that a page divides into stages, for every local batch: the time of that grows with their square."""
_END = 2
"""The operations that end the step of a class where one device has it: the agreement of all ranks, and the update."""


class Written(NamedTuple):
    """Schedules as records for the engine, and in sentences what of ``DIVIDED`` a page leaves out."""

    schedules: list[dict[str, Any]]
    left_out: list[str]


def written(workload: Workload, local_batches: Sequence[int], room_bytes: int) -> Written:
    """Return the Schedules of a workload at the local batches of a page that has so much room for them."""
    records: list[dict[str, Any]] = []
    refused: dict[str, str] = {}  # strategy -> what it needs
    larger: dict[str, list[str]] = {}
    for accumulate in MICRO_BATCHES:
        for strategy in DIVIDED:
            if strategy in refused:
                continue
            if parse_strategy(strategy).stages > 1 and len(workload.layers) > MOST_STAGED_LAYERS:
                refused[strategy] = f"workloads of up to {MOST_STAGED_LAYERS} layers"
                continue
            try:
                of_strategy = list(_of(workload, strategy, accumulate, local_batches))
            except ConfigError as error:
                refused[strategy] = error.allowed
                continue
            size = sum(len(json.dumps(record, separators=(",", ":"))) for record in of_strategy)
            if size > room_bytes:
                larger.setdefault(strategy, []).append(str(accumulate))
                continue
            room_bytes -= size
            records += of_strategy
    sentences = []
    for needed in dict.fromkeys(refused.values()):
        alike = ", ".join(strategy for strategy, need in refused.items() if need == needed)
        sentences.append(f"Left out: {alike} (possible: {needed})")
    if larger:
        each = "; ".join(f"{strategy} in {', '.join(counts)}" for strategy, counts in larger.items())
        sentences.append(f"Left out, for the page would be too large, are steps by micro-batches of {each}")
    return Written(records, sentences)


def _of(workload: Workload, strategy: str, accumulate: int, local_batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield a record for each way in which the layers are divided; it depends on the local batch. Raises."""
    classes = parse_strategy(strategy).classes
    alike: dict[tuple[int, ...], list[Plan]] = {}
    for local_batch in local_batches:
        plan = Plan(
            devices=classes,
            global_batch=local_batch * accumulate,
            accumulate=accumulate,
            strategy=strategy,
            fusion_rule="per-tensor",
        )
        bounds = stage_bounds(workload, plan) if plan.parallelism.stages > 1 else ()
        alike.setdefault(bounds, []).append(plan)
    for plans in alike.values():
        batches = [round(plan.local_batch) for plan in plans]
        yield {"strategy": strategy, "accumulate": accumulate, "local_batches": batches} | _record(
            lower(workload, plans[-1]), batches[-1]
        )


def _record(schedule: Schedule, local_batch: int) -> dict[str, Any]:
    """Return the arrays of a Schedule up to the ends of its classes, and its tensors by the classes that have them."""
    count = len(schedule.kind) - _END * schedule.classes
    ends = schedule.kind[count:].tolist()
    if ends != [SYNCHRONISE_EVENT, UPDATE_EVENT] * schedule.classes:
        raise RuntimeError(f"a Schedule of strategy {schedule.plan.strategy} that ends in another way")
    order, layers = schedule.workload.ready_order, schedule.workload.layers
    ready = {tensor: place for place, tensor in enumerate(order.tensor.tolist())}
    begins = schedule.depends_start[: count + 1]
    offsets = np.repeat(np.arange(count), np.diff(begins)) - schedule.depends_on[: begins[-1]]
    groups: dict[tuple[int, int, bool], list[int]] = {}
    divides = schedule.plan.parallelism.parts > 1
    buckets = (schedule.bucket_class.tolist(), schedule.bucket_copies.tolist(), schedule.tensor_order.tolist())
    for first, copies, tensor in zip(*buckets, strict=True):
        of_block = divides and layers[order.layer[ready[tensor]]].column_block >= 0
        groups.setdefault((first, copies, of_block), []).append(ready[tensor])
    columns = ("kind", "layer", "micro_batch", "rank_class", "peer", "meeting")
    return {name: _runs(getattr(schedule, name)[:count]) for name in columns} | {
        "sample_bytes": _runs(schedule.size_bytes[:count] / local_batch),
        "dependencies": _runs(np.diff(begins)),
        "offsets": _runs(offsets),
        "agreement": int(schedule.meeting[count]),
        "stashes": schedule.stashes,
        "groups": [
            {"rank_class": first, "copies": copies, "tensors": _runs(tensors)}
            for (first, copies, _), tensors in groups.items()
        ],
    }


def _runs(values: ArrayLike) -> list[float]:
    """Return the differences of neighbours (the first from 0), each with the times that it stands there in a row."""
    differences = np.diff(np.asarray(values, np.float64), prepend=0.0)
    edges = np.concatenate([[0], np.flatnonzero(np.diff(differences)) + 1, [len(differences)]])
    runs: list[float] = []
    for begin, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if stop > begin:
            value = float(differences[begin])
            runs += [int(value) if value.is_integer() else value, stop - begin]
    return runs
