"""Strategy zero1 in the model: what its step costs, what it needs of memory, and what is assumed without tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from predict_cases import machines, workloads
from small_step import machine, plan, workload

from dpsim.collective import Collective
from dpsim.errors import ConfigError
from dpsim.experiments.bench_predict import machine as bench_machine
from dpsim.experiments.bench_predict import resnet50
from dpsim.lowering import lower
from dpsim.machine import AllreduceCost, Link, Machine, OverlapCost
from dpsim.model import memory, predict, predict_points
from dpsim.model.cost import idle_curve
from dpsim.optimizer import AdamW, Lars, Optimizer, Sgd
from dpsim.plan import OVERLAPS, Plan
from dpsim.schedule import (
    ALL_GATHER_EVENT,
    COMMUNICATION_LANE,
    REDUCE_SCATTER_EVENT,
    SYNCHRONISE_EVENT,
    UPDATE_EVENT,
)
from dpsim.setting import Grid
from dpsim.workload import Workload

SIZES = (8, 200, 400)


def table(kind: Any, *time_s: float, **changes: Any) -> AllreduceCost:
    fields = {"algorithm": "ring", "devices": 2, "sizes_bytes": SIZES, "time_s": time_s, "kind": kind} | changes
    return AllreduceCost(**fields)


def calibrated(**changes: Any) -> Machine:
    """On 2 devices: allreduces of 8 s, reduce-scatters of 3 s (of 8 bytes 0.25 s), all-gathers of 2 s."""
    fields: dict[str, Any] = {
        "allreduce": (table("allreduce", 8.0, 8.0, 8.0),),
        "halves": (table("reduce-scatter", 0.25, 3.0, 3.0), table("all-gather", 2.0, 2.0, 2.0)),
    }
    return Machine(name="m", **fields | changes)


def sharded(**changes: Any) -> Plan:
    return plan(strategy="zero1", algorithm="ring", **changes)


def test_only_the_reduce_scatters_overlap_and_the_update_is_that_of_a_shard() -> None:
    compute = 0.5 + 3 + 6
    behind = 0.25 + 1 / 2 + 2 * 2
    whole = predict(workload(), calibrated(), sharded())
    assert whole.step_s == compute + 2 * 3 + behind and whole.update_s == 0.5
    assert not whole.extrapolated
    # b's reduce-scatter (3 s) starts when b is ready, 2 s before backward ends; 1 + 3 s are exposed
    beside = predict(workload(), calibrated(), sharded(overlap="thread"))
    assert beside.step_s == compute + 1 + 3 + behind
    assert beside.exposed_communication_s == 1 + 3 + 0.25 + 4
    alone = predict(workload(), calibrated(), sharded(devices=1, global_batch=4))
    assert alone.step_s == compute + 1


def test_a_reduce_scatter_beside_backward_costs_what_its_own_table_says() -> None:
    beside = OverlapCost(
        algorithm="ring",
        devices=2,
        overlap="thread",
        sizes_bytes=(400,),
        time_s=(4.0,),
        compute_loss_s=(2.0,),
        kind="reduce-scatter",
    )
    of_allreduce = OverlapCost(
        algorithm="ring", devices=2, overlap="thread", sizes_bytes=(400,), time_s=(80.0,), compute_loss_s=(0.0,)
    )
    both = calibrated(overlap=(of_allreduce, beside))
    step = predict(workload(), both, sharded(overlap="thread"))
    assert step.backward_s == pytest.approx(4 + 4)  # half as fast for 4 s
    halved = predict(workload(), calibrated(overlap=(of_allreduce,)), sharded(overlap="thread"))
    assert halved.extrapolated and halved.backward_s == pytest.approx(6)


def test_without_tables_each_half_costs_half_of_the_allreduce_and_that_is_said() -> None:
    plain = calibrated(halves=())
    step = predict(workload(), plain, sharded())
    assert step.step_s == pytest.approx(0.5 + 3 + 6 + 2 * 4 + 4 + 0.5 + 2 * 4) and step.extrapolated
    options: dict[str, Any] = {"global_batch": 8, "overlap": "off", "algorithm": "ring", "strategy": "zero1"}
    points, summary = predict_points(workload(), plain, Grid.of(devices=2, fusion_threshold_bytes=0.0, **options))
    assert points[0]["strategy"] == "zero1"
    assert any("half of the allreduce" in caution for caution in summary["cautions"])
    _, summary = predict_points(workload(), calibrated(), Grid.of(devices=2, fusion_threshold_bytes=0.0, **options))
    assert not any("half of the allreduce" in caution for caution in summary["cautions"])
    _, summary = predict_points(
        workload(), plain, Grid.of(devices=2, fusion_threshold_bytes=0.0, **options | {"strategy": "data-parallel"})
    )
    assert not any("half of the allreduce" in caution for caution in summary["cautions"])


@pytest.mark.parametrize(("algorithm", "halved"), [("ring", True), ("nccl", False)])
def test_a_link_alone_halves_an_allreduce_unless_nccl_goes_around_a_ring_of_its_own(
    algorithm: str, halved: bool
) -> None:
    by_link = Machine(name="m", link=Link(latency_s=1e-3, bandwidth_bytes_per_s=1e9))
    whole, half = (
        idle_curve(by_link, Collective(algorithm=algorithm, devices=8, kind=kind)).points[1, 0]
        for kind in ("allreduce", "all-gather")
    )
    assert (half == pytest.approx(whole / 2)) == halved
    options: dict[str, Any] = {"global_batch": 8, "overlap": "off", "algorithm": algorithm, "strategy": "zero1"}
    _, summary = predict_points(workload(), by_link, Grid.of(devices=8, fusion_threshold_bytes=0.0, **options))
    assert any("going around its ring once" in caution for caution in summary["cautions"]) != halved


@pytest.mark.parametrize(("optimizer", "slots"), [(Sgd(), 1), (AdamW(), 2), (Lars(), 1)])
def test_optimizer_state_is_divided_by_the_devices(optimizer: Optimizer, slots: int) -> None:
    w = resnet50()
    fields: dict[str, Any] = {"global_batch": 200_000, "algorithm": "ring", "optimizer": optimizer}
    fields |= {"fusion_threshold_bytes": 25e6}
    for devices in (8, 64, 100_000):
        plain = memory(w, Plan(devices=devices, **fields), bench_machine())
        own = memory(w, Plan(devices=devices, strategy="zero1", **fields), bench_machine())
        assert plain.optimizer_state == slots * w.gradient_bytes
        buckets = lower(w, Plan(devices=devices, **fields)).buckets
        surplus = own.optimizer_state - plain.optimizer_state / devices
        assert 0 <= surplus <= slots * buckets * 64
        assert plain.total - own.total == plain.optimizer_state - own.optimizer_state


@settings(max_examples=60)
@given(workloads(), machines())
def test_a_sharded_schedule_is_the_plain_one_with_shards_around_the_update(w: Workload, m: Machine) -> None:
    for devices, mode in ((2, "local"), (3, "leaf")):
        fields: dict[str, Any] = {"devices": devices, "global_batch": 16, "algorithm": "ring", "accumulate": 2}
        fields |= {"batch_norm": mode, "leaves": 8 if mode == "leaf" else 0, "fusion_threshold_bytes": 1000.0}
        plain, own = lower(w, Plan(**fields)), lower(w, Plan(strategy="zero1", **fields))
        update = len(plain.kind) - 1
        assert own.sharded and not plain.sharded and own.buckets == plain.buckets
        others = plain.bucket[:update] < 0
        assert np.array_equal(own.kind[:update][others], plain.kind[:update][others])
        assert own.kind[update:].tolist() == [SYNCHRONISE_EVENT, UPDATE_EVENT] + [ALL_GATHER_EVENT] * own.buckets
        scatters, gathers = own.gradient_collectives, own.parameter_collectives
        assert (own.kind[scatters] == REDUCE_SCATTER_EVENT).all() and (own.lane[gathers] == COMMUNICATION_LANE).all()
        for a, b in zip(scatters, plain.gradient_collectives, strict=True):
            assert a == b and own.dependencies(int(a)).tolist() == plain.dependencies(int(b)).tolist()
        if own.buckets:
            assert own.dependencies(update).tolist() == scatters.tolist()
            assert {*own.dependencies(update + 1).tolist()} == {*plain.dependencies(update).tolist(), update}
        assert all(own.dependencies(int(gather)).tolist() == [update + 1] for gather in gathers)
        assert own.size_bytes[gathers].tolist() == own.size_bytes[scatters].tolist()
    alone = lower(w, Plan(devices=1, global_batch=16, strategy="zero1", algorithm="ring"))
    assert not alone.sharded and not len(alone.parameter_collectives)
    for overlap in OVERLAPS:
        p = Plan(devices=2, global_batch=16, algorithm="auto", strategy="zero1", overlap=overlap)
        assert predict(w, m, p).step_s >= 0


def test_a_step_costs_as_much_to_predict_on_100000_devices_as_on_8() -> None:
    few, many = (
        lower(resnet50(), Plan(devices=n, global_batch=200_000, strategy="zero1", algorithm="ring"))
        for n in (8, 100_000)
    )
    assert len(few.kind) == len(many.kind)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fusion_rule": "horovod", "algorithm": "ring"}, "decides buckets while running"),
        ({"algorithm": "mpi"}, "no reduce-scatter and no all-gather"),
        ({"algorithm": "one-shot"}, "no reduce-scatter and no all-gather"),
        ({"algorithm": "recursive-doubling"}, "no reduce-scatter and no all-gather"),
        ({"algorithm": "hierarchical", "layout": "2x2"}, "no reduce-scatter and no all-gather"),
        ({"algorithm": "direct", "wire_dtype": "float16"}, "parameters are gathered as they are"),
    ],
)
def test_what_cannot_be_sharded_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Plan(devices=4, global_batch=16, strategy="zero1", **fields)
    Plan(devices=4, global_batch=16, **fields)


def test_tables_of_halves_have_their_own_place() -> None:
    half = table("all-gather", 1.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="another kind"):
        Machine(name="m", allreduce=(half,))
    with pytest.raises(ConfigError, match="another kind"):
        machine(halves=(table("allreduce", 1.0, 1.0, 1.0),))
        Machine(name="m", allreduce=(table("allreduce", 1.0, 1.0, 1.0),), halves=(table("allreduce", 1.0, 1.0, 1.0),))
