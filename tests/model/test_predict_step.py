"""What the model says in cases whose answer is known, and what it says of costs, memory, nulls and mistakes."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from predict_cases import machines, plans, workloads
from small_step import machine, plan, workload

from dpsim import codec
from dpsim.collective import Collective, Layout
from dpsim.errors import ConfigError
from dpsim.experiments.bench_predict import machine as bench_machine
from dpsim.experiments.bench_predict import resnet50
from dpsim.machine import AllreduceCost, ComputeSlowdown, Link, Machine, OverlapCost
from dpsim.model import (
    alpha_beta,
    choose_overlap,
    collective_cost,
    compute_slowdown,
    memory,
    nulls,
    predict,
    predict_points,
    timeline,
)
from dpsim.model.cost import added_s, overlapped_curve
from dpsim.model.curve import at
from dpsim.model.formulas import rounds
from dpsim.model.link_fit import fitted_link
from dpsim.model.step import price, scheduled
from dpsim.optimizer import AdamW, Optimizer, Sgd
from dpsim.plan import OVERLAPS, Plan
from dpsim.setting import Grid
from dpsim.workload import Workload

QUICK = settings(max_examples=60)


def test_closed_forms_of_one_small_step() -> None:
    compute = 0.5 + 3 + 6 + 1
    alone = predict(workload(), machine(), plan(devices=1, global_batch=4))
    assert (alone.step_s, alone.exposed_communication_s) == (compute, 0.0)
    assert predict(workload(), machine(), plan()).step_s == compute + 2 * 5
    assert predict(workload(), machine(), plan(overlap="inline")).step_s == compute + 2 * 5
    # one bucket of 800 bytes: beyond the table, 5 s + 400 bytes x 0.01 s
    one = predict(workload(), machine(), plan(fusion_rule="one"))
    assert (one.step_s, one.buckets, one.extrapolated) == (compute + 9, 1, True)
    # b's allreduce (5 s) starts when b is ready, 2 s before backward ends; 3 + 5 s are exposed
    beside = predict(workload(), machine(), plan(overlap="thread"))
    assert (beside.step_s, beside.exposed_communication_s) == (compute + 8, 8.0)
    assert not beside.extrapolated


def test_a_thread_slows_both_lanes_as_its_table_says() -> None:
    """Beside backward 10 s instead of 5, taking half of it: a's 2 s take 4, and 0.4 of b's message is then done."""
    table = OverlapCost(
        algorithm="mpi", devices=2, overlap="thread", sizes_bytes=(400,), time_s=(10.0,), compute_loss_s=(5.0,)
    )
    p = predict(workload(), machine(overlap=(table,)), plan(overlap="thread"))
    assert p.backward_s == pytest.approx(4 + 4)
    assert p.exposed_communication_s == pytest.approx(0.6 * 5 + 5)


def test_buckets_are_ready_after_computation_which_what_runs_beside_it_slows_down() -> None:
    """b is ready after 4 s of backward, a after 2 s more: 4 s beside b's allreduce. Inline backward stands still."""
    table = OverlapCost(
        algorithm="mpi", devices=2, overlap="thread", sizes_bytes=(400,), time_s=(10.0,), compute_loss_s=(5.0,)
    )

    def ready_s(overlap: str, priced_on: Machine) -> list[float]:
        schedule = scheduled(workload(), priced_on, plan(overlap=overlap))
        return price(schedule, priced_on).buckets_ready_s().tolist()

    for overlap in ("off", "inline", "thread"):
        assert ready_s(overlap, machine()) == pytest.approx([4, 6])
    assert ready_s("thread", machine(overlap=(table,))) == pytest.approx([4, 8])


def test_polling_starts_a_stage_only_where_someone_looks() -> None:
    """Direct is 2 stages of 2.5 s: b's first is noticed when a is ready (2 s later: not ended), the rest follows."""
    table = AllreduceCost(algorithm="direct", devices=2, sizes_bytes=(400,), time_s=(3.0,))
    beside = OverlapCost(
        algorithm="direct",
        devices=2,
        overlap="poll",
        sizes_bytes=(400,),
        time_s=(3.0,),
        compute_loss_s=(0.25,),
        poll_s=0.125,
    )
    m = machine(allreduce=(table,), overlap=(beside,))
    p = predict(workload(), m, plan(overlap="poll", algorithm="direct"))
    # b: starts at 7.5, computes 0.25 less, a poll at its end; first stage ends at 9, noticed at 9.875 + poll = 10
    assert p.backward_s == pytest.approx(4 + 0.25 + 0.125 + 2 + 0.125 + 0.125)
    assert p.exposed_communication_s == pytest.approx(1.5 - 0.125 + 3)


def test_launches_hold_the_device_back() -> None:
    layers = tuple(msgspec.structs.replace(layer, launch_s=5.0) for layer in workload().layers)
    p = predict(workload(layers=layers), machine(), plan(devices=1, global_batch=4))
    assert p.step_s == 0.5 + 4 * 5 + 2 + 1


def test_the_slowest_device_has_the_largest_share_and_accumulation_splits_it() -> None:
    free = machine(allreduce=(), link=Link(latency_s=0.0, bandwidth_bytes_per_s=math.inf))
    for batch, devices, accumulate, share in ((8, 2, 1, 4.0), (9, 2, 1, 5.0), (9, 4, 1, 3.0), (10, 2, 2, 2.5)):
        p = predict(workload(), free, plan(global_batch=batch, devices=devices, accumulate=accumulate))
        assert p.forward_s == pytest.approx(accumulate * 3 * share / 4)
        assert p.step_s == pytest.approx(0.5 + accumulate * 9 * share / 4 + 1)


def test_seconds_that_several_devices_lose_come_once_a_step_whatever_the_batch() -> None:
    slowdowns = (ComputeSlowdown(devices=2, factor=1.5, added_s=2.0), ComputeSlowdown(devices=4, factor=1.5))
    m = machine(compute_slowdown=slowdowns)
    assert [added_s(m, n) for n in (1, 2, 3, 4, 8)] == [0.0, 2.0, 1.0, 0.0, 0.0]
    without = machine(compute_slowdown=tuple(msgspec.structs.replace(each, added_s=0.0) for each in slowdowns))
    for global_batch in (2, 16):
        p = plan(global_batch=global_batch)
        assert predict(workload(), m, p).step_s == pytest.approx(predict(workload(), without, p).step_s + 2.0)
    alone = plan(devices=1)
    assert predict(workload(), m, alone).step_s == predict(workload(), without, alone).step_s


def test_compute_slowdown_between_and_beyond_calibrated_device_counts() -> None:
    m = machine(compute_slowdown=(ComputeSlowdown(devices=2, factor=1.5), ComputeSlowdown(devices=4, factor=2.5)))
    assert [compute_slowdown(m, n) for n in (1, 2, 3, 4, 8)] == [
        (1.0, False),
        (1.5, False),
        (2.0, False),
        (2.5, False),
        (2.5, True),
    ]
    assert compute_slowdown(machine(), 64) == (1.0, False)
    assert predict(workload(), m, plan()).forward_s == 4.5


def test_devices_that_share_cores_are_slower_at_least_by_their_ratio() -> None:
    m = machine(
        cores=2, compute_slowdown=(ComputeSlowdown(devices=2, factor=1.25), ComputeSlowdown(devices=4, factor=1.0))
    )
    assert [compute_slowdown(m, n) for n in (1, 2, 4, 8)] == [(1.0, False), (1.25, False), (2.0, False), (4.0, True)]
    assert compute_slowdown(machine(cores=2), 8) == (4.0, True)
    assert compute_slowdown(machine(cores=2), 8, Layout("4x2")) == (1.0, False)
    assert compute_slowdown(machine(cores=2, emulated_network=True), 8, Layout("4x2")) == (4.0, True)
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=math.inf)
    _, summary = predict_points(workload(), machine(cores=2, link=link), Grid.of(devices=[2, 8], global_batch=16))
    assert summary["best"][1]["speedup"] <= 2.01
    assert any("8 devices share 2 cores" in sentence for sentence in summary["cautions"])


def test_what_a_prediction_assumes_is_said() -> None:
    ethernet = Machine(name="e", link=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9))
    points, summary = predict_points(workload(), ethernet, Grid.of(devices=4, global_batch=16, algorithm="one-shot"))
    messages = " ".join(summary["cautions"])
    assert points[0]["extrapolated"] and points[0]["interval_level"] is None
    assert (
        "one-shot works in memory" in messages and "no overlap tables" in messages and "machine file states" in messages
    )
    fitted = machine(link=Link(latency_s=1.0, bandwidth_bytes_per_s=10.0, fitted_to="mpi on 2", median_residual=0.05))
    _, summary = predict_points(workload(), fitted, Grid.of(devices=4, global_batch=16))
    assert any("the nearest tables (mpi on 2), scaled" in one for one in summary["cautions"])
    _, summary = predict_points(workload(), fitted, Grid.of(devices=4, global_batch=16, algorithm="ring"))
    assert any("fitted to mpi on 2 devices (residual 5% in the median" in one for one in summary["cautions"])
    assert predict_points(workload(), machine(), Grid.of(devices=1, global_batch=4))[1]["cautions"] == []


def test_shared_memory_algorithms_between_nodes_cost_what_the_librarys_own_does() -> None:
    link = Link(latency_s=1.0, bandwidth_bytes_per_s=10.0)
    m = Machine(name="m", link=link)
    asked = [Collective(algorithm=name, devices=4, layout=Layout("2x2")) for name in ("auto", "one-shot", "ring")]
    assert [m.priced(collective).algorithm for collective in asked] == ["mpi", "mpi", "ring"]
    assert m.priced(Collective(algorithm="one-shot", devices=4)).algorithm == "one-shot"


def test_overlap_beyond_the_calibrated_device_counts_costs_what_it_does_at_the_nearest() -> None:
    table = OverlapCost(
        algorithm="mpi", devices=2, overlap="thread", sizes_bytes=(400,), time_s=(10.0,), compute_loss_s=(5.0,)
    )
    link = Link(latency_s=1.0, bandwidth_bytes_per_s=100.0)
    m = machine(link=link, overlap=(table,))
    curve, _ = overlapped_curve(m, Collective(algorithm="mpi", devices=4), "thread")
    alone = collective_cost(m, "mpi", 4, 400)[0]
    assert at(curve.points, 1, 400.0) == pytest.approx(2 * alone) and at(curve.points, 2, 400.0) == 5.0


@pytest.mark.parametrize("algorithm", ["ring", "mpi", "hierarchical"])
def test_the_fitted_link_is_the_one_that_made_the_tables(algorithm: str) -> None:
    link = Link(latency_s=2e-5, bandwidth_bytes_per_s=1e9)
    source = Machine(name="m", link=link)
    sizes = (4, 1024, 65536, 2**20)
    tables = tuple(
        AllreduceCost(
            algorithm=algorithm,
            devices=count,
            layout=layout,
            sizes_bytes=sizes,
            time_s=tuple(collective_cost(source, algorithm, count, size, layout=Layout(layout))[0] for size in sizes),
        )
        for count, layout in ((4, "2x2"), (8, "2x4"))
    )
    actual = fitted_link(tables)
    assert actual is not None and actual.largest_residual < 1e-6
    assert actual.latency_s == pytest.approx(link.latency_s)
    assert actual.bandwidth_bytes_per_s == pytest.approx(link.bandwidth_bytes_per_s)


def test_what_the_host_adds_to_messages_and_buckets_stands_apart_from_the_wire() -> None:
    bare = Machine(name="m", link=Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9))
    link = Link(latency_s=1e-4, message_overhead_s=3e-5, bucket_overhead_s=7e-5, bandwidth_bytes_per_s=1e9)
    host = Machine(name="m", link=link)
    for devices, messages in ((2, 2), (4, 6)):
        costs = [collective_cost(each, "ring", devices, 4096)[0] for each in (bare, host)]
        assert costs[1] - costs[0] == pytest.approx(messages * 3e-5 + 7e-5)
    sizes = (4, 1024, 65536)
    slower = Machine(name="m", link=Link(latency_s=1.3e-4, bandwidth_bytes_per_s=1e9))
    times = tuple(collective_cost(slower, "ring", 4, size)[0] for size in sizes)
    tables = [AllreduceCost(algorithm="ring", devices=4, sizes_bytes=sizes, time_s=times)]
    actual = fitted_link(tables, emulated=True, wire_latency_s=1e-4)
    assert actual is not None and actual.latency_s == pytest.approx(1e-4)
    assert actual.message_overhead_s == pytest.approx(3e-5)


def test_costs_within_below_and_beyond_a_table() -> None:
    m = machine()
    for size, expected in ((0, 0.0), (10, 1.1), (100, 2.0), (150, 2.5), (400, 5.0), (800, 9.0)):
        cost, extrapolated = collective_cost(m, "mpi", 2, size)
        assert cost == pytest.approx(expected) and extrapolated == (size in (10, 800))
    assert collective_cost(m, "ring", 1, 800) == (0.0, False)
    noisy = AllreduceCost(algorithm="mpi", devices=2, sizes_bytes=(100, 200, 399, 400), time_s=(2.0, 3.0, 5.9, 5.0))
    assert collective_cost(machine(allreduce=(noisy,)), "mpi", 2, 800) == (9.0, True)
    single = AllreduceCost(algorithm="mpi", devices=2, sizes_bytes=(100,), time_s=(2.0,))
    assert [collective_cost(machine(allreduce=(single,)), "mpi", 2, s)[0] for s in (50, 100, 300)] == [1.0, 2.0, 6.0]


def test_the_links_formula_where_no_table_covers_the_case() -> None:
    m = machine(link=Link(latency_s=1.0, bandwidth_bytes_per_s=10.0, reduce_s_per_byte=0.01))
    a, b, g, size = 1.0, 0.1, 0.01, 600
    expected = {
        ("ring", 3): 4 * a + 4 / 3 * size * b + 2 / 3 * size * g,
        ("direct", 3): 4 * a + 4 / 3 * size * b + 2 / 3 * size * g,
        ("recursive-doubling", 4): 2 * (a + size * b + size * g),
        ("recursive-doubling", 5): 2 * (a + size * b + size * g) + 2 * (a + size * b) + size * g,
        ("halving-doubling", 4): 4 * a + 1.5 * size * b + 0.75 * size * g,
        ("halving-doubling", 6): 4 * a + 1.5 * size * b + 0.75 * size * g + 2 * (a + size * b) + size * g,
    }
    for (algorithm, devices), seconds in expected.items():
        cost, extrapolated = collective_cost(m, algorithm, devices, size)
        assert (cost, extrapolated) == (pytest.approx(seconds), True)
    only_link = Machine(name="l", link=m.link)
    for devices, size in itertools.product((3, 4), (1, 10, 100, 1000)):
        names = ("recursive-doubling", "halving-doubling", "ring")
        lowest = min(collective_cost(m, name, devices, size)[0] for name in names)
        assert collective_cost(only_link, "mpi", devices, size) == (pytest.approx(lowest), True)


def test_rounds_of_the_algorithms() -> None:
    names = ("mpi", "direct", "ring", "recursive-doubling", "halving-doubling")
    assert [[rounds(Collective(algorithm=name, devices=n)) for name in names] for n in (2, 3, 4, 6)] == [
        [1, 2, 2, 1, 2],
        [1, 2, 4, 3, 4],
        [1, 2, 6, 2, 4],
        [1, 2, 10, 4, 6],
    ]


def test_alpha_and_beta_are_the_line_through_a_straight_table() -> None:
    assert alpha_beta(machine(), "mpi", 2) == (pytest.approx(1.0), pytest.approx(0.01))
    assert alpha_beta(machine(), "mpi", 1) == (0.0, 0.0)
    link = machine(link=Link(latency_s=1.0, bandwidth_bytes_per_s=10.0))
    assert alpha_beta(link, "ring", 4) == (pytest.approx(6.0), pytest.approx(0.15))
    falling = AllreduceCost(algorithm="mpi", devices=2, sizes_bytes=(100, 200), time_s=(2.0, 1.0))
    alpha_s, beta = alpha_beta(machine(allreduce=(falling,)), "mpi", 2)
    assert beta == 0.0 and 1.0 < alpha_s < 2.0


def test_nulls() -> None:
    actual = nulls(workload(), machine(), plan(overlap="thread"))
    assert actual["perfect_scaling"] == ((0.5 + 2 * 9 + 1) / 2, 0.0)
    assert actual["alpha_beta_no_overlap"] == (pytest.approx(10.5 + 10), pytest.approx(10.0))
    assert actual["largest_bucket"] == (10.5 + 9, 9.0)
    assert actual["free_communication"] == (10.5, 0.0)
    assert actual["nothing_hidden"] == (20.5, 10.0)
    assert "nothing_hidden" not in nulls(workload(), machine(), plan(overlap="off"))


def test_overlap_off_wins_a_tie() -> None:
    assert choose_overlap(workload(), machine(), [plan()], ["off", "inline"]) == ("off", {"off": 20.5, "inline": 20.5})


def test_a_machine_without_overlap_tables_is_taken_to_overlap_freely() -> None:
    assert choose_overlap(workload(), machine(), [plan()]) == ("thread", {"thread": 18.5})
    assert choose_overlap(workload(), machine(), [plan(devices=1)]) == ("off", {})


def test_one_mechanism_is_chosen_for_all_points_that_are_compared() -> None:
    """A thread hides what comes early and takes compute time from every message: per row the two would mix."""
    table = OverlapCost(
        algorithm="mpi", devices=2, overlap="thread", sizes_bytes=(400,), time_s=(5.0,), compute_loss_s=(0.0,)
    )
    slow = OverlapCost(
        algorithm="mpi",
        devices=2,
        overlap="thread",
        sizes_bytes=(100, 400, 800),
        time_s=(5.0, 5.0, 90.0),
        compute_loss_s=(0.0, 0.0, 90.0),
    )
    for tables in ((table,), (slow,)):
        m = machine(overlap=tables)
        points, _ = predict_points(
            workload(), m, Grid.of(devices=[1, 2], fusion_threshold_bytes=[0.0, 100.0, math.inf], global_batch=8)
        )
        assert {point["overlap"] for point in points} == {"thread"}
    single = [choose_overlap(workload(), m, [plan(fusion_rule=rule)])[0] for rule in ("per-tensor", "one")]
    assert single == ["thread", "off"]


def test_only_measured_mechanisms_are_tried_where_some_were_measured() -> None:
    table = OverlapCost(
        algorithm="mpi", devices=2, overlap="thread", sizes_bytes=(400,), time_s=(5.0,), compute_loss_s=(0.0,)
    )
    best, steps = choose_overlap(workload(), machine(overlap=(table,)), [plan()])
    assert best == "thread" and steps["thread"] == 18.5 and list(steps) == ["off", "inline", "thread"]
    with pytest.raises(ConfigError, match="thread"):
        choose_overlap(workload(), machine(), [plan()], ["thred"])


def test_memory_that_nobody_stated_is_unknown() -> None:
    needed = memory(workload(), plan(), machine(memory_bytes=1e9))
    assert (needed.activations, needed.fits) == (None, None)
    assert memory(workload(), plan(), machine(memory_bytes=100)).fits is False
    layers = tuple(msgspec.structs.replace(layer, activation_bytes_per_sample=10.0) for layer in workload().layers)
    assert memory(workload(layers=layers), plan(), machine()).fits is None


def test_memory_by_part() -> None:
    layers = tuple(msgspec.structs.replace(layer, activation_bytes_per_sample=10.0) for layer in workload().layers)
    w = workload(layers=layers, state_bytes=7, optimizer_slots=2)
    needed = memory(w, plan(global_batch=9), machine(memory_bytes=3707))
    assert needed.parts() == {
        "parameters": 807,
        "gradients": 800,
        "optimizer_state": 1600,
        "activations": 100,
        "communication_buffers": 400,
    }
    assert needed.total == 3707 and needed.fits
    assert not memory(w, plan(global_batch=9), machine(memory_bytes=3706)).fits
    assert memory(w, plan(devices=1), machine()).communication_buffers == 0
    assert memory(w, plan(fusion_rule="horovod"), machine()).communication_buffers == 800
    assert memory(w, plan(accumulate=2), machine()).activations == 40


@pytest.mark.parametrize(("optimizer", "slots"), [(Sgd(), 1), (AdamW(), 2)])
def test_memory_counts_the_optimizers_slots(optimizer: Optimizer, slots: int) -> None:
    assert memory(workload(), plan(optimizer=optimizer), machine()).optimizer_state == slots * 800
    assert memory(workload(optimizer_slots=3), plan(optimizer=optimizer), machine()).optimizer_state == 3 * 800


def test_points_have_the_fixed_names_and_one_device_is_predicted_once() -> None:
    points, summary = predict_points(
        workload(),
        machine(),
        Grid.of(devices=[1, 2], fusion_threshold_bytes=[0.0, math.inf], global_batch=8, overlap="off"),
    )
    assert [(p["devices"], p["fusion_threshold_bytes"], p["buckets"]) for p in points] == [
        (1, None, 1),
        (2, 0.0, 2),
        (2, math.inf, 1),
    ]
    names = (
        "devices",
        "layout",
        "global_batch",
        "local_batch",
        "fusion_rule",
        "fusion_threshold_bytes",
        "buckets",
        "network",
        "emulated_compute",
        "emulated_network",
        "predicted_step_s",
        "predicted_low_s",
        "predicted_high_s",
        "predicted_exposed_communication_s",
        "calibrated_on",
        "extrapolated",
        "memory_bytes",
        "fits",
    )
    assert all(set(names) <= set(point) for point in points)
    best = summary["best"][1]
    assert best["fusion_threshold_bytes"] == math.inf and best["speedup"] == pytest.approx(19.5 / 19.5)
    assert '"fusion_threshold_bytes": "inf"' in codec.to_json(points)
    json.loads(codec.to_json(summary))


def test_what_the_machine_does_not_know_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"'ring' on 3 devices[\s\S]*mpi on 2[\s\S]*\[link\]"):
        predict(workload(), machine(), plan(devices=3, global_batch=9, algorithm="ring"))
    with pytest.raises(ConfigError, match="algorithm"):
        collective_cost(machine(), "rink", 2, 4)
    with pytest.raises(ConfigError, match="1 or more"):
        predict_points(workload(), machine(), Grid.of(devices=0, global_batch=8))
    with pytest.raises(ConfigError, match="takes no threshold"):
        predict_points(
            workload(), machine(), Grid.of(devices=2, fusion_threshold_bytes=1.0, fusion_rule="one", global_batch=8)
        )
    with pytest.raises(ConfigError, match="overlap"):
        predict_points(workload(), machine(), Grid.of(devices=2, global_batch=8, overlap="always"))


@QUICK
@given(workloads(), machines(), plans())
def test_a_faster_network_or_more_overlap_is_never_slower(w: Workload, m: Machine, p: Plan) -> None:
    """Free allreduces leave computation alone; without overlap, dearer allreduces never shorten a step."""
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=math.inf)
    free = Machine(name="free", link=link, compute_slowdown=m.compute_slowdown)
    alone = predict(w, free, p)
    assert alone.exposed_communication_s == 0.0
    off = msgspec.structs.replace(p, overlap="off", fusion_rule="per-tensor", fusion_threshold_bytes=None)
    dearer = tuple(msgspec.structs.replace(t, time_s=tuple(2 * x for x in t.time_s)) for t in m.allreduce)
    first, second = predict(w, m, off), predict(w, msgspec.structs.replace(m, allreduce=dearer), off)
    assert alone.step_s <= first.step_s + 1e-12 and first.step_s <= second.step_s + 1e-12
    without_tables = msgspec.structs.replace(m, overlap=())
    thread = predict(w, without_tables, msgspec.structs.replace(off, overlap="thread"))
    assert thread.step_s <= first.step_s + 1e-12


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_horovods_cycle_decides_the_buckets_of_the_model(overlap: str) -> None:
    """ResNet-50 at 2 ms a backward layer: a cycle of 20 ms joins what became ready in it, a short one less."""

    def buckets(cycle_s: float, threshold: float = math.inf) -> int:
        p = Plan(
            devices=8,
            global_batch=256,
            fusion_rule="horovod",
            overlap=overlap,
            cycle_s=cycle_s,  # type: ignore[arg-type]
            fusion_threshold_bytes=threshold,
        )
        events = timeline(resnet50(), bench_machine(), p)
        assert events.size_bytes.sum() == resnet50().gradient_bytes
        return predict(resnet50(), bench_machine(), p).buckets

    assert buckets(1e-3, 0.0) == 161
    assert buckets(1e-3) == (1 if overlap == "off" else 107)
    assert 1 <= buckets(20e-3) <= 20


def test_plans_share_what_follows_from_the_machine_alone() -> None:
    """This keeps predictions fast; ``dpsim.experiments.bench_predict`` measures how fast."""
    w, m = resnet50(), bench_machine()

    def kept_after(threshold: float) -> int:
        predict(w, m, Plan(devices=8, global_batch=256, fusion_threshold_bytes=threshold))
        return len(m.memo)

    assert kept_after(1e4) == kept_after(1e6) > 0


def test_importing_the_model_loads_no_mpi_torch_or_matplotlib() -> None:
    heavy = ("mpi4py", "matplotlib", "torch", "cupy", "pandas")
    code = f"import dpsim.model, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
