"""ZeRO-2 and ZeRO-3: what has the same memory is never there at once, and no rank waits for itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering_cases import LAYER_KINDS, chain, check_computation, check_sums, finished_before, graphs, rows_of

from dpsim.errors import ConfigError
from dpsim.lowering import lower
from dpsim.plan import Plan
from dpsim.schedule import (
    ALL_GATHER_EVENT,
    ALLREDUCE_EVENT,
    BACKWARD_EVENT,
    FORWARD_EVENT,
    REDUCE_SCATTER_EVENT,
    SYNCHRONISE_EVENT,
    UPDATE_EVENT,
    Schedule,
)
from dpsim.workload import Layer, Tensor, Workload

QUICK = settings(max_examples=60, deadline=None)
ARRAYS = (
    *("kind", "layer", "bucket", "micro_batch", "size_bytes", "depends_start", "depends_on", "tensor_order"),
    *("bucket_start", "bucket_size_bytes", "rank_class", "peer", "meeting", "bucket_class"),
)


def plan(
    strategy: str, accumulate: int = 1, threshold: float = 0.0, devices: int = 2, batch_norm: str = "local"
) -> Plan:
    return Plan(
        devices=devices,
        accumulate=accumulate,
        global_batch=devices * accumulate * 2,
        strategy=strategy,
        fusion_threshold_bytes=threshold,
        batch_norm=batch_norm if accumulate == 1 else "local",  # type: ignore[arg-type]
    )


THRESHOLDS = st.sampled_from([0.0, 5e3, 2e4, float("inf")])
NORMS = st.sampled_from(["local", "global"])


def check_gradient_slots(schedule: Schedule) -> None:
    """Assert that no bucket is written before the reduce-scatter of the one that had its memory has ended."""
    before, rows = finished_before(schedule), rows_of(schedule)
    layer_of = {
        tensor.name: number for number, layer in enumerate(schedule.workload.layers) for tensor in layer.tensors
    }
    summed = dict(zip(schedule.bucket[schedule.gradient_collectives], schedule.gradient_collectives, strict=True))
    for bucket in range(schedule.gradient_slots, schedule.buckets) if schedule.gradient_slots else ():
        for name in schedule.bucket_tensors(bucket):
            assert before[rows[BACKWARD_EVENT, layer_of[name], 0]] >> int(summed[bucket - schedule.gradient_slots]) & 1


def check_parameter_slots(schedule: Schedule) -> None:
    """Assert that each computation finds its unit gathered, and that no gather overwrites what is being read."""
    before, kinds = finished_before(schedule), schedule.kind.tolist()
    unit_of = {
        layer: bucket
        for bucket in range(schedule.buckets)
        for layer, each in enumerate(schedule.workload.layers)
        if {tensor.name for tensor in each.tensors} & {*schedule.bucket_tensors(bucket)}
    }
    slots = schedule.parameter_slots or schedule.buckets
    gathered: dict[int, tuple[int, int]] = {}  # slot: unit, the gather that brought it
    readers: dict[int, list[int]] = {}
    for operation, kind in enumerate(kinds):
        if kind == ALL_GATHER_EVENT:
            unit = int(schedule.bucket[operation])
            assert all(before[operation] >> reader & 1 for reader in readers.pop(unit % slots, []))
            assert gathered.get(unit % slots, (-1, 0))[0] != unit
            gathered[unit % slots] = unit, operation
        elif kind in LAYER_KINDS and (layer := int(schedule.layer[operation])) in unit_of:
            unit, gather = gathered[unit_of[layer] % slots]
            assert unit == unit_of[layer] and before[operation] >> gather & 1
            readers.setdefault(unit % slots, []).append(operation)


@QUICK
@given(graphs(), st.integers(1, 3), st.integers(1, 3), THRESHOLDS, NORMS)
def test_zero2_writes_no_bucket_before_the_one_in_its_memory_is_summed(
    workload: Workload, buckets: int, accumulate: int, threshold: float, norm: str
) -> None:
    schedule = lower(workload, plan(f"zero2:buckets={buckets}", accumulate, threshold, batch_norm=norm))
    check_computation(schedule)
    check_sums(schedule)
    check_gradient_slots(schedule)
    zero1 = lower(workload, plan("zero1", accumulate, threshold, batch_norm=norm))
    assert schedule.sharded and schedule.parameter_slots == 0
    assert sorted(schedule.kind) == sorted(zero1.kind) and (schedule.bucket_start == zero1.bucket_start).all()
    if accumulate > 1 or schedule.buckets <= buckets:
        assert schedule.gradient_slots == 0
    if schedule.gradient_slots:
        assert buckets <= schedule.gradient_slots < schedule.buckets
    else:
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(schedule, name), getattr(zero1, name))


def test_a_layer_whose_tensors_fill_more_buckets_than_there_are_slots_gets_them() -> None:
    tensors = tuple(Tensor(name=f"t{each}", shape=(4,)) for each in range(3))
    wide = Layer(name="wide", forward_s=(1.0,), backward_s=(1.0,), tensors=tensors)
    narrow = [
        Layer(name=f"n{i}", forward_s=(1.0,), backward_s=(1.0,), tensors=(Tensor(name=f"n{i}", shape=(4,)),))
        for i in range(3)
    ]
    schedule = lower(Workload(name="wide", local_batches=(1,), layers=(*narrow, wide)), plan("zero2:buckets=1"))
    assert schedule.buckets == 6 and schedule.gradient_slots == 3


@QUICK
@given(graphs(), st.integers(0, 3), st.booleans(), st.integers(1, 3), THRESHOLDS, NORMS)
def test_zero3_computes_with_gathered_units_and_never_overwrites_one_in_use(
    workload: Workload, prefetch: int, reshard: bool, accumulate: int, threshold: float, norm: str
) -> None:
    strategy = f"zero3:prefetch={prefetch},reshard={'yes' if reshard else 'no'}"
    schedule = lower(workload, plan(strategy, accumulate, threshold, batch_norm=norm))
    check_computation(schedule)
    check_sums(schedule)
    check_gradient_slots(schedule)
    check_parameter_slots(schedule)
    slots = prefetch + 1 if prefetch + 1 < schedule.buckets else 0
    assert schedule.gradient_slots == (slots if accumulate == 1 else 0)
    assert schedule.parameter_slots == (slots if reshard else 0)
    gathers = schedule.parameter_collectives
    passes_after_the_first = 2 * accumulate - 1
    again = schedule.buckets - slots if schedule.parameter_slots else 0
    assert len(gathers) == schedule.buckets + passes_after_the_first * again
    assert schedule.kind[-1] == UPDATE_EVENT and schedule.kind[-2] == SYNCHRONISE_EVENT
    layers_of_bucket = np.split(workload.ready_order.layer, schedule.bucket_start[1:-1])
    assert len({int(layer) for layers in layers_of_bucket for layer in {*layers}}) == sum(
        len({*layers.tolist()}) for layers in layers_of_bucket
    )


@QUICK
@given(graphs(), st.booleans(), st.integers(1, 3), THRESHOLDS)
def test_replicas_add_up_each_shard_behind_its_reduce_scatter_and_wait_for_nothing_else(
    workload: Workload, reshard: bool, accumulate: int, threshold: float
) -> None:
    text = f"zero3:reshard={'yes' if reshard else 'no'}"
    schedule = lower(workload, plan(f"{text},replicas=2", accumulate, threshold, devices=6))
    check_computation(schedule)
    check_parameter_slots(schedule)
    between = np.flatnonzero(schedule.kind == ALLREDUCE_EVENT)
    sums = schedule.gradient_collectives
    assert schedule.bucket[between].tolist() == schedule.bucket[sums].tolist()
    assert [schedule.dependencies(row).tolist() for row in between] == [[row] for row in sums.tolist()]
    assert (between == sums + 1).all() and (schedule.size_bytes[between] == -(-schedule.size_bytes[sums] // 3)).all()
    alone = lower(workload, plan(text, accumulate, threshold, devices=3))
    kept = np.flatnonzero(schedule.kind != ALLREDUCE_EVENT)
    assert schedule.kind[kept].tolist() == alone.kind.tolist()
    number = {row: place for place, row in enumerate(kept.tolist())}
    number |= {row: number[before] for row, before in zip(between.tolist(), sums.tolist(), strict=True)}
    for row in kept.tolist():
        waits = [number[each] for each in schedule.dependencies(row).tolist()]
        assert waits == alone.dependencies(number[row]).tolist()


def test_a_gather_may_run_while_as_many_units_compute_as_are_prefetched() -> None:
    schedule = lower(chain(6), plan("zero3:prefetch=2"))
    rows, gathers = rows_of(schedule), schedule.parameter_collectives.tolist()
    forwards = [rows[FORWARD_EVENT, layer, 0] for layer in range(6)]
    assert schedule.bucket[gathers].tolist() == [5, 4, 3, 2, 1, 0, 3, 4, 5]
    begins = [schedule.dependencies(gather).tolist() for gather in gathers]
    backwards = [rows[BACKWARD_EVENT, layer, 0] for layer in (5, 4, 3)]
    assert begins == [[0], [0], [0], *([forward] for forward in forwards[:3]), *([each] for each in backwards)]
    needing = forwards + [rows[BACKWARD_EVENT, layer, 0] for layer in (2, 1, 0)]
    assert all(gather in schedule.dependencies(each) for gather, each in zip(gathers, needing, strict=True))


def test_reduce_scatters_of_zero3_stand_among_the_last_micro_batch() -> None:
    schedule = lower(chain(4), plan("zero3", accumulate=2))
    rows = rows_of(schedule)
    for collective in np.flatnonzero(schedule.kind == REDUCE_SCATTER_EVENT).tolist():
        assert collective == rows[BACKWARD_EVENT, 3 - schedule.bucket[collective], 1] + 1


def test_a_unit_has_one_dtype() -> None:
    tensors = (Tensor(name="a", shape=(4,)), Tensor(name="b", shape=(4,), dtype="float64"))
    layer = Layer(name="mixed", forward_s=(1.0,), backward_s=(1.0,), tensors=tensors)
    with pytest.raises(ConfigError, match=r"'mixed', whose tensors have several dtypes"):
        lower(Workload(name="w", local_batches=(1,), layers=(layer,)), plan("zero3"))


@pytest.mark.parametrize(
    "strategy", ["zero2:buckets=1", "zero3:prefetch=0", "pipeline:stages=1", "pipeline:stages=1,shard=yes"]
)
def test_one_device_has_the_schedule_of_data_parallelism(strategy: str) -> None:
    one = lower(chain(4), plan(strategy, 2, devices=1))
    plain = lower(chain(4), plan("data-parallel", 2, devices=1))
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(one, name), getattr(plain, name))
    assert not one.sharded and one.classes == 1 and one.gradient_slots == one.parameter_slots == 0
