"""The lowering: what a plan makes of a workload, on random ones."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from lowering_cases import chain
from predict_cases import plans, workloads

from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.lowering import lower
from dpsim.lowering.computation import ready_times
from dpsim.plan import Plan
from dpsim.schedule import (
    BACKWARD_EVENT,
    COMMUNICATION_LANE,
    COMPUTE_LANE,
    FORWARD_EVENT,
    LOSS_EVENT,
    OVERHEAD_EVENT,
    UPDATE_EVENT,
)
from dpsim.workload import Layer, Tensor, Workload

QUICK = settings(max_examples=100)


def test_a_script_may_reduce_in_each_micro_batch_and_the_next_one_waits_for_that() -> None:
    layers, ddp = chain(3).layers, DdpSettings(torch="2.13.0", devices=2, deferred=False)
    workload = Workload(name="script", local_batches=(1,), layers=layers, ddp=ddp)
    plan = Plan(devices=2, global_batch=4, accumulate=2, fusion_threshold_bytes=0.0)
    schedule = lower(workload, plan)
    sums = schedule.gradient_collectives
    assert schedule.bucket[sums].tolist() == [0, 1, 2] * 2
    assert schedule.micro_batch[sums].tolist() == [0] * 3 + [1] * 3
    (begins,) = np.flatnonzero((schedule.kind == FORWARD_EVENT) & (schedule.layer == 0) & (schedule.micro_batch == 1))
    assert {*sums[:3]} <= {*schedule.dependencies(int(begins))}
    assert {*sums[3:]} <= {*schedule.dependencies(int(np.flatnonzero(schedule.kind == UPDATE_EVENT)[0]))}
    for one in (msgspec.structs.replace(plan, accumulate=1), msgspec.structs.replace(plan, devices=1)):
        assert len(lower(workload, one).gradient_collectives) == (3 if one.devices > 1 else 0)


@pytest.mark.parametrize(
    ("reduces", "accumulate", "expected"), [((1, 3), 4, [1, 3]), ((1, 3), 8, [1, 3, 5, 7]), ((0,), 3, [0, 2])]
)
def test_a_script_may_reduce_in_some_micro_batches(
    reduces: tuple[int, ...], accumulate: int, expected: list[int]
) -> None:
    ddp = DdpSettings(torch="2.13.0", devices=2, accumulate=4, deferred=False, reduces=reduces)
    workload = Workload(name="script", local_batches=(1,), layers=chain(1).layers, ddp=ddp)
    schedule = lower(workload, Plan(devices=2, global_batch=2 * accumulate, accumulate=accumulate))
    assert schedule.micro_batch[schedule.gradient_collectives].tolist() == expected


@QUICK
@given(workloads(dtypes=("float32", "float64")), plans())
def test_a_schedule_holds_every_tensor_once_and_communicates_it_in_the_last_micro_batch(
    workload: Workload, plan: Plan
) -> None:
    schedule = lower(workload, plan, alpha_s=1e-4, beta_s_per_byte=1e-8)
    kind, layers = schedule.kind, len(workload.layers)
    assert sorted(schedule.tensor_order) == list(range(len(workload.tensors)))
    names = [name for bucket in range(schedule.buckets) for name in schedule.bucket_tensors(bucket)]
    assert sorted(names) == sorted(tensor.name for tensor in workload.tensors)
    assert schedule.bucket_size_bytes.sum() == workload.gradient_bytes
    dtypes = {tensor.name: tensor.dtype for tensor in workload.tensors}
    for bucket in range(schedule.buckets):
        assert len({dtypes[name] for name in schedule.bucket_tensors(bucket)}) == 1

    event = schedule.kind
    forward = [(FORWARD_EVENT, i) for i in range(layers)]
    backward = [(BACKWARD_EVENT, i) for i in reversed(range(layers))]
    compute = 1 + (2 * layers + 1) * plan.accumulate
    computed = list(zip(event[:compute], schedule.layer[:compute], strict=True))
    assert computed == [(OVERHEAD_EVENT, -1)] + [*forward, (LOSS_EVENT, -1), *backward] * plan.accumulate
    assert schedule.micro_batch[1:compute].tolist() == [
        m for m in range(plan.accumulate) for _ in range(2 * layers + 1)
    ]
    assert kind[-1] == UPDATE_EVENT and schedule.lane[-1] == COMPUTE_LANE

    collectives = schedule.gradient_collectives
    silent = plan.devices == 1 or schedule.dynamic
    assert schedule.dynamic == (plan.fusion_rule == "horovod" and plan.devices > 1)
    assert len(collectives) == (0 if silent else schedule.buckets)
    waits_for = schedule.dependencies(len(kind) - 1).tolist()
    assert waits_for == (collectives.tolist() or [len(kind) - 2])
    layer_of = {tensor.name: i for i, layer in enumerate(workload.layers) for tensor in layer.tensors}
    for k, operation in enumerate(collectives):
        waits_for = schedule.dependencies(operation)
        assert schedule.lane[operation] == COMMUNICATION_LANE and schedule.bucket[operation] == k
        assert schedule.size_bytes[operation] == schedule.bucket_size_bytes[k]
        assert (event[waits_for] == BACKWARD_EVENT).all()
        assert (schedule.micro_batch[waits_for] == plan.accumulate - 1).all()
        tensors = schedule.bucket_tensors(k)
        assert sorted(set(schedule.layer[waits_for].tolist())) == sorted({layer_of[name] for name in tensors})
    for operation in range(len(kind)):
        assert (schedule.dependencies(operation) < operation).all()


def two_layers() -> Workload:
    wa, wb, bb = Tensor(name="wa", shape=(4,)), Tensor(name="wb", shape=(8,)), Tensor(name="bb", shape=(1,))
    layers = (
        Layer(name="a", forward_s=(1.0,), backward_s=(3.0,), gradient_ready_s=(2.0,), tensors=(wa,)),
        Layer(name="b", forward_s=(1.0,), backward_s=(5.0,), tensors=(wb, bb)),
    )
    return Workload(name="two", local_batches=(4,), layers=layers)


def test_ready_times_count_from_the_start_of_backward() -> None:
    assert ready_times(two_layers(), 4.0).tolist() == [5.0, 5.0, 7.0]
    assert ready_times(two_layers(), 8.0).tolist() == [10.0, 10.0, 14.0]


def test_mg_wfbp_takes_its_ready_times_from_the_workload_unless_they_are_given() -> None:
    plan = Plan(devices=2, global_batch=8, fusion_rule="mg-wfbp")
    cheap = {"alpha_s": 0.5, "beta_s_per_byte": 0.0}
    assert lower(two_layers(), plan, **cheap).bucket_start.tolist() == [0, 2, 3]
    assert lower(two_layers(), plan, np.array([0.0, 0.0, 0.1]), **cheap).bucket_start.tolist() == [0, 3]
    with pytest.raises(ConfigError, match="alpha_beta"):
        lower(two_layers(), plan)


def test_one_device_needs_no_machine_and_communicates_nothing() -> None:
    schedule = lower(two_layers(), Plan(devices=1, global_batch=4, fusion_rule="mg-wfbp"))
    assert schedule.buckets == 1 and not len(schedule.gradient_collectives)
