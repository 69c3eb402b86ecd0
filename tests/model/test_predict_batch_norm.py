"""The extra sums of batch norm over devices: where a schedule has them, and what the model charges for them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predict_cases import machines, workloads

from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.lowering import lower
from dpsim.machine import AllreduceCost, Link, Machine
from dpsim.model import memory, predict, predict_points, timeline
from dpsim.nn import build_model
from dpsim.optimizer import AdamW, Lars
from dpsim.plan import OVERLAPS, Plan
from dpsim.runtime.describe import describe
from dpsim.schedule import SYNCHRONISE_EVENT
from dpsim.setting import Grid
from dpsim.workload import Layer, Tensor, Workload

LOCAL = Plan(devices=2, global_batch=16)
GLOBAL = msgspec.structs.replace(LOCAL, batch_norm="global")
LEAF = msgspec.structs.replace(LOCAL, batch_norm="leaf", leaves=8)


def with_batch_norm(workload: Workload, channels: int = 5) -> Workload:
    """The workload with a batch norm after its first layer."""
    tensors = tuple(Tensor(name=f"bn.{role}", shape=(channels,)) for role in ("gamma", "beta"))
    norm = Layer(
        name="bn",
        forward_s=(1e-3,),
        backward_s=(2e-3,),
        tensors=tensors,
        batch_norm_channels=channels,
        kind="batch-norm",
    )
    return msgspec.structs.replace(workload, layers=(workload.layers[0], norm, *workload.layers[1:]))


def test_ordered_sums_cost_what_their_table_says_and_without_one_what_an_allreduce_does() -> None:
    tensors = (Tensor(name="w", shape=(4,)),)
    layer = Layer(name="dense", forward_s=(1e-3,), backward_s=(2e-3,), tensors=tensors)
    workload = with_batch_norm(
        Workload(name="w", local_batches=(8,), layers=(layer, msgspec.structs.replace(layer, name="last", tensors=())))
    )
    allreduce = AllreduceCost(algorithm="auto", devices=2, sizes_bytes=(4, 1024), time_s=(1e-5, 1e-5))
    sums = AllreduceCost(algorithm="direct", devices=2, sizes_bytes=(4, 1024), time_s=(7e-5, 7e-5), kind="ordered-sum")
    plan = msgspec.structs.replace(GLOBAL, algorithm="auto", overlap="off", fusion_rule="one")
    without, own = Machine(name="m", allreduce=(allreduce,)), Machine(name="m", allreduce=(allreduce,), halves=(sums,))
    costs = [predict(workload, machine, plan).step_s for machine in (without, own)]
    assert costs[1] - costs[0] == pytest.approx(2 * (7e-5 - 1e-5))
    local = msgspec.structs.replace(plan, batch_norm="local")
    assert predict(workload, own, local).step_s == predict(workload, without, local).step_s


def test_a_schedule_has_the_sums_that_the_layers_ask_for() -> None:
    workload = describe(build_model("cnn:4,6", (8, 8, 1), 3), "cnn")
    schedule = lower(workload, GLOBAL)
    stops = np.flatnonzero(schedule.kind == SYNCHRONISE_EVENT)
    assert [schedule.operation_name(i - 1) for i in stops] == [
        "forward bn1",
        "forward bn2",
        "backward bn2",
        "backward bn1",
    ]
    assert schedule.operation_name(int(stops[0])) == "synchronise bn1"
    assert schedule.size_bytes[stops].tolist() == [8 * 9, 8 * 13, 4 * 12, 4 * 8]
    schedule = lower(workload, LEAF)
    (stop,) = np.flatnonzero(schedule.kind == SYNCHRONISE_EVENT)
    assert schedule.size_bytes[stop] == 8 * 9 + 8 * 13 and schedule.layer[stop] == -1
    for plan in (LOCAL, msgspec.structs.replace(GLOBAL, devices=1), msgspec.structs.replace(LEAF, devices=1)):
        assert not (lower(workload, plan).kind == SYNCHRONISE_EVENT).any()
    assert not (lower(describe(build_model("mlp:4", (8, 8, 1), 3), "mlp"), GLOBAL).kind == SYNCHRONISE_EVENT).any()


def test_a_step_takes_as_much_longer_as_the_sums_cost() -> None:
    layer = Layer(name="a", forward_s=(1.0,), backward_s=(2.0,), tensors=(Tensor(name="wa", shape=(100,)),))
    workload = with_batch_norm(Workload(name="w", local_batches=(8,), layers=(layer,), update_s=1.0))
    table = AllreduceCost(algorithm="mpi", devices=2, sizes_bytes=(10, 1000), time_s=(1.0, 2.0))
    machine = Machine(name="m", allreduce=(table,))
    cost = {size: float(np.interp(size, (10, 1000), (1, 2))) for size in (88, 40)}
    local = predict(workload, machine, LOCAL)
    for plan, extra in ((GLOBAL, cost[88] + cost[40]), (LEAF, cost[88])):
        actual = predict(workload, machine, plan)
        assert actual.step_s == pytest.approx(local.step_s + extra)
        assert actual.exposed_communication_s == pytest.approx(local.exposed_communication_s + extra)
        assert (actual.forward_s, actual.backward_s) == pytest.approx((local.forward_s, local.backward_s))
    line = timeline(workload, machine, GLOBAL)
    spans = {line.operations[o]: (s, e) for o, s, e in zip(line.operation, line.start_s, line.end_s, strict=True)}
    assert spans["synchronise bn"][1] <= spans["update"][0]


@settings(max_examples=60)
@given(
    workload=workloads(launches=False),
    machine=machines(),
    overlap=st.sampled_from(OVERLAPS),
    rule=st.sampled_from(["per-tensor", "one", "horovod"]),
    base=st.sampled_from([GLOBAL, LEAF]),
)
def test_a_step_is_the_sum_of_its_parts_under_every_overlap(
    workload: Workload, machine: Machine, overlap: str, rule: str, base: Plan
) -> None:
    if (overlap, rule, base) == ("inline", "horovod", GLOBAL):
        return
    workload = with_batch_norm(workload)
    plan = msgspec.structs.replace(base, overlap=overlap, fusion_rule=rule, cycle_s=1e-4)
    actual, local = (
        predict(workload, machine, plan),
        predict(workload, machine, msgspec.structs.replace(plan, batch_norm="local", leaves=0)),
    )
    factor = 1.0 if not machine.compute_slowdown else machine.compute_slowdown[0].factor
    parts = actual.forward_s + actual.backward_s + actual.update_s + actual.exposed_communication_s
    assert actual.step_s == pytest.approx(parts + workload.overhead_s * factor, rel=1e-6, abs=1e-9)
    if overlap in ("off", "inline"):
        assert actual.step_s >= local.step_s * (1 - 1e-12)


def test_points_of_both_norms_are_the_plans_of_both_and_a_scripts_own_norm_is_taken() -> None:
    layer = Layer(name="a", forward_s=(1.0,), backward_s=(2.0,), tensors=(Tensor(name="wa", shape=(100,)),))
    plain = Workload(name="w", local_batches=(8,), layers=(layer,), update_s=1.0)
    workload = with_batch_norm(plain)
    machine = Machine(
        name="m", allreduce=(AllreduceCost(algorithm="mpi", devices=2, sizes_bytes=(10, 1000), time_s=(1.0, 2.0)),)
    )
    both: dict[str, Any] = {"global_batch": 16, "overlap": "off", "batch_norm": ("local", "global"), "algorithm": "mpi"}
    points, _ = predict_points(workload, machine, Grid.of(devices=2, **both))
    expected = [predict(workload, machine, msgspec.structs.replace(plan, algorithm="mpi")) for plan in (LOCAL, GLOBAL)]
    assert [(p["batch_norm"], p["predicted_step_s"]) for p in points] == [
        ("local", expected[0].step_s),
        ("global", expected[1].step_s),
    ]
    with pytest.raises(ConfigError, match="batch_norm is leaf, and there are no leaves"):
        predict_points(workload, machine, Grid.of(devices=2, batch_norm="leaf"))
    with pytest.raises(ConfigError, match="no layer states batch_norm_channels"):
        predict_points(plain, machine, Grid.of(devices=2, batch_norm="global"))
    ddp = DdpSettings(torch="2.13.0", devices=2, sync_batch_norm=True)
    for trained, norm, noted in ((workload, "global", False), (plain, "local", True)):
        (point,), summary = predict_points(msgspec.structs.replace(trained, ddp=ddp), machine, Grid.of(devices=2))
        assert (point["batch_norm"], any("SyncBatchNorm" in text for text in summary["cautions"])) == (norm, noted)
        assert ("batch norm over all devices" in summary["from_script"]) == (not noted)


@pytest.mark.parametrize(
    "fields",
    [
        {"batch_norm": "global", "leaves": 8},
        {"leaves": 8},
        {"strategy": "zero1", "optimizer": Lars()},
        {"batch_norm": "global", "compute_dtype": "bfloat16"},
        {"optimizer": AdamW(), "wire_dtype": "float64", "cycle_s": 5e-3, "fusion_rule": "horovod"},
    ],
)
def test_a_prediction_has_every_field_of_its_plan(fields: dict[str, Any]) -> None:
    layer = Layer(name="a", forward_s=(1.0,), backward_s=(2.0,), tensors=(Tensor(name="wa", shape=(30, 40)),))
    workload = with_batch_norm(Workload(name="w", local_batches=(8,), layers=(layer,), update_s=1.0))
    machine = Machine(name="m", link=Link(latency_s=1e-3, bandwidth_bytes_per_s=1e3))
    (point,), _ = predict_points(
        workload, machine, Grid.of(devices=2, algorithm="ring", global_batch=16, overlap="off", **fields)
    )
    norm = {"batch_norm": "leaf"} if "leaves" in fields else {}
    plan = Plan(devices=2, global_batch=16, algorithm="ring", **norm | fields)
    step = predict(workload, machine, plan)
    needed = memory(workload, plan, machine)
    assert point["predicted_step_s"] == step.step_s
    assert set(Plan.__struct_fields__) <= set(point) and point["leaves"] == plan.leaves
    assert point["memory_bytes"]["optimizer_state"] == needed.optimizer_state
    without = predict(workload, machine, Plan(devices=2, global_batch=16, algorithm="ring"))
    assert step != without or "compute_dtype" in fields or "optimizer" in fields


def test_a_prediction_refuses_a_setting_that_is_none_and_says_what_leaves_cost() -> None:
    layer = Layer(name="a", forward_s=(1.0,), backward_s=(2.0,), tensors=(Tensor(name="wa", shape=(30, 40)),))
    workload = Workload(name="w", local_batches=(8,), layers=(layer,), update_s=1.0)
    machine = Machine(name="m", link=Link(latency_s=1e-3, bandwidth_bytes_per_s=1e3))
    with pytest.raises(ConfigError, match="did you mean 'leaves'"):
        predict_points(workload, machine, Grid.of(devices=2, leafs=8))
    cautions = [
        predict_points(workload, machine, Grid.of(devices=2, leaves=leaves))[1]["cautions"] for leaves in (0, 8)
    ]
    assert ["leaf by leaf" in " ".join(each) for each in cautions] == [False, True]
