"""Free numbers fitted to measured steps: they come back from the steps that they made, or are refused by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from small_step import machine as machine_of_tables
from small_step import workload

from dpsim.errors import ConfigError
from dpsim.machine import ComputeSlowdown, Link, Machine
from dpsim.model import predict
from dpsim.model.estimate import FREE, ROW_ERROR, Estimated, MeasuredStep, estimate
from dpsim.model.step import price, scheduled
from dpsim.plan import Plan
from dpsim.workload import Workload

TRUE = {"compute": 10.5, "bandwidth": 400.0, "latency": 0.05, "overhead": 0.2, "contention": 1.8, "loss": 1.1}
TRUE |= {"growth": 0.05, "taken": 0.4}
START = Machine(
    name="m",
    link=Link(latency_s=0.05, bandwidth_bytes_per_s=1e3),
    loss_growth=TRUE["growth"],
    computation_taken=TRUE["taken"],
)
TOLD_APART = ["compute", "bandwidth", "overhead", "contention", "loss"]


def machine(**values: float) -> Machine:
    """A machine on which the free numbers have these values."""
    known = TRUE | values
    return Machine(
        name="true",
        link=Link(latency_s=known["latency"], bandwidth_bytes_per_s=known["bandwidth"]),
        contention=known["contention"],
        collective_overhead_s=known["overhead"],
        compute_slowdown=(ComputeSlowdown(devices=2, factor=known["loss"]),),
        loss_growth=known["growth"],
        computation_taken=known["taken"],
    )


def plans(*devices: int) -> list[Plan]:
    """Plans of these devices of one node with overlap and without, in one bucket and in several."""
    return [
        Plan(devices=n, layout=f"1x{n}", global_batch=4 * n, fusion_rule=rule, algorithm="ring", overlap=overlap)
        for n in devices
        for rule in ("one", "per-tensor")
        for overlap in ("off", "thread")
    ]


def steps(of: list[Plan], known: Machine, trained: Workload | None = None) -> list[MeasuredStep]:
    trained = trained or workload()
    return [MeasuredStep(plan, price(scheduled(trained, known, plan), known).step_s) for plan in of]


def values(found: Estimated) -> dict[str, float]:
    return {number.name: number.value for number in found.numbers}


@settings(max_examples=3, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.floats(0.5, 1.5), st.floats(50.0, 150.0), st.floats(0.05, 0.3), st.floats(1.2, 2.0), st.floats(1.02, 1.3))
def test_the_numbers_that_made_the_steps_come_back(
    compute: float, bandwidth: float, overhead: float, contention: float, loss: float
) -> None:
    true = {"bandwidth": bandwidth, "overhead": overhead, "contention": contention, "loss": loss}
    true["growth"] = 0.05
    trained = workload().slowed(compute)
    found = estimate(workload(), START, steps(plans(1, 2, 4, 16), machine(**true), trained), ["compute", *true])
    assert values(found) == pytest.approx(true | {"compute": 10.5 * compute}, rel=0.02)
    assert max(map(abs, found.errors)) < 1e-3


def test_all_free_numbers_come_back_and_the_files_predict_the_rows() -> None:
    rows = steps(plans(1, 2, 8, 32), machine())
    found = estimate(workload(), START, rows, list(FREE))
    assert values(found) == pytest.approx(TRUE, rel=0.02)
    for row in rows:
        again = predict(found.workload, found.machine, row.plan)
        assert again.step_s == pytest.approx(row.step_s, rel=1e-3)
        assert again.low_s is not None and again.low_s < row.step_s


def test_noisy_rows_make_numbers_less_sure_and_never_surer_than_the_model() -> None:
    exact = steps(plans(1, 2, 4, 8), machine())
    noise = np.random.default_rng(2).normal(0.0, 0.05, len(exact))  # of which no number ends at a bound
    noisy = [MeasuredStep(row.plan, row.step_s * math.exp(e)) for row, e in zip(exact, noise, strict=True)]
    sure, unsure = (estimate(workload(), START, rows, TOLD_APART) for rows in (exact, noisy))
    for before, after in zip(sure.numbers, unsure.numbers, strict=True):
        errors = [each.value * each.relative_uncertainty for each in (before, after)]
        assert errors[1] > 1.1 * errors[0] > 0
        assert abs(math.log(after.value / TRUE[after.name])) < 4 * after.relative_uncertainty
    (alone,) = estimate(workload(), START, exact[:1], ["compute"]).numbers
    assert alone.relative_uncertainty == pytest.approx(ROW_ERROR, rel=1e-3)


def test_files_state_the_uncertainties_and_intervals_grow_with_them() -> None:
    found = estimate(workload(), START, steps(plans(1, 2, 4, 8), machine()), [*TOLD_APART, "latency"])
    doubts = {number.name: number.relative_uncertainty for number in found.numbers}
    stated = found.machine
    assert found.workload.relative_uncertainty == doubts["compute"]
    assert stated.link is not None
    assert stated.link.relative_uncertainty == max(doubts["bandwidth"], doubts["latency"])
    assert stated.contention_uncertainty == doubts["contention"]
    assert stated.collective_overhead_uncertainty == doubts["overhead"]
    plan = plans(4)[3]
    narrow = predict(found.workload, stated, plan)
    for field in ("contention_uncertainty", "collective_overhead_uncertainty"):
        wide = predict(found.workload, msgspec.structs.replace(stated, **{field: 2.0}), plan)
        assert wide.high_s is not None and narrow.high_s is not None and wide.high_s > narrow.high_s


def test_what_is_not_free_is_assumed_and_stated() -> None:
    rows = steps(plans(1, 2, 8), machine(overhead=0.0))
    found = estimate(workload(), START, rows, ["compute", "bandwidth"])
    assert set(found.machine.assumed) >= {"contention", "compute_slowdown"}
    fitted = estimate(workload(), START, rows, ["compute", "bandwidth", "contention", "loss"])
    assert not {"contention", "compute_slowdown"} & {*fitted.machine.assumed}


def test_a_workload_without_times_gets_them_from_its_sizes() -> None:
    bare = msgspec.structs.replace(workload().slowed(0.0), local_batches=(1,))
    rows = steps(plans(1, 2), machine(contention=2.0, loss=1.05, overhead=0.0))
    found = estimate(bare, START, rows, ["compute", "bandwidth"])
    alone = predict(found.workload, found.machine, rows[0].plan)
    assert alone.step_s == pytest.approx(rows[0].step_s, rel=0.05)
    assert alone.backward_s == pytest.approx(2 * alone.forward_s)


@pytest.mark.parametrize(
    ("of", "free", "words"),
    [
        (
            plans(1)[:1],
            ["compute", "bandwidth"],
            r"2 free numbers \(compute, bandwidth\), and rows: 1[\s\S]*--free compute",
        ),
        (plans(1), ["compute", "bandwidth"], r"no row tells bandwidth[\s\S]*a row of more devices"),
        (plans(2)[::2], ["compute", "contention"], r"no row tells contention[\s\S]*with overlap beside one without"),
        (plans(2), ["compute", "loss"], r"cannot tell compute and loss apart[\s\S]*a row of one device"),
        (plans(2), ["compute", "speed"], "free number"),
        (plans(2), [], "no free number"),
    ],
)
def test_what_the_rows_do_not_tell_is_refused_by_name(of: list[Plan], free: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        estimate(workload(), START, steps(of, machine()), free)


@pytest.mark.parametrize(
    ("known", "free", "words"),
    [
        (machine_of_tables(), "bandwidth", r"has tables of allreduces[\s\S]*leave bandwidth and latency out"),
        (machine(), "loss", "loss is free, and machine 'true' has tables"),
    ],
)
def test_a_free_number_that_tables_say_is_refused(known: Machine, free: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        estimate(workload(), known, steps(plans(1, 2), machine()), ["compute", free])


@pytest.mark.parametrize("factor", [20.0, 0.05, 1e30])
def test_rows_that_contradict_each_other_are_refused_with_the_row(factor: float) -> None:
    rows = steps(plans(1, 2), machine())
    wrong = [*rows, rows[-1]._replace(step_s=factor * rows[-1].step_s)]
    with pytest.raises(
        ConfigError, match=r"row \d: a step of 8 samples on 1x2 devices took .* fit all rows best say"
    ) as said:
        estimate(workload(), START, wrong)
    assert "wrong unit" in said.value.remedy
    estimate(workload(), START, rows)


@pytest.mark.parametrize("step_s", [0.0, -1.0, math.inf, math.nan])
def test_a_step_that_is_no_time_is_refused(step_s: Any) -> None:
    with pytest.raises(ConfigError, match="row 1: a step of"):
        estimate(workload(), START, [MeasuredStep(plans(1)[0], step_s)], ["compute"])


def test_the_overhead_of_collectives_comes_once_for_each_and_its_doubt_widens_the_interval() -> None:
    plain = machine(overhead=0.0)
    off = plans(2)[2]
    assert off.fusion_rule == "per-tensor" and off.overlap == "off"
    added = msgspec.structs.replace(plain, collective_overhead_s=0.25)
    assert predict(workload(), added, off).step_s == pytest.approx(predict(workload(), plain, off).step_s + 2 * 0.25)
    alone = plans(1)[0]
    assert predict(workload(), added, alone) == predict(workload(), plain, alone)
    with pytest.raises(ConfigError, match="collective_overhead_s is -1"):
        Machine(name="m", link=plain.link, collective_overhead_s=-1.0)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["overhead", "contention", "loss"]), st.floats(0, 2), st.floats(0, 2), st.sampled_from(plans(2)))
def test_more_of_any_never_makes_a_step_faster(name: str, one: float, other: float, plan: Plan) -> None:
    base = 0.0 if name == "overhead" else 1.0
    less, more = (predict(workload(), machine(**{name: base + each}), plan).step_s for each in sorted((one, other)))
    assert less <= more * (1 + 1e-12)


@pytest.mark.parametrize("loss", [1.0, 1.01])
def test_chains_that_lose_less_than_is_assumed_are_fitted_without_a_loss(loss: float) -> None:
    known = msgspec.structs.replace(machine(loss=loss, growth=0.0, overhead=0.0), computation_taken=0.0)
    slow = msgspec.structs.replace(known, link=Link(latency_s=0.0, bandwidth_bytes_per_s=1e5))
    bare = Machine(name="m", link=Link(latency_s=0.0, bandwidth_bytes_per_s=1e3))
    off = [plan for plan in plans(1, 2, 8) if plan.overlap == "off"]
    found = estimate(workload(), bare, steps(off, slow), ["compute", "bandwidth"])
    assert found.loses_less and found.machine.loss_growth == 0
    assert [slowdown.factor for slowdown in found.machine.compute_slowdown] == [1.0]
    assert max(map(abs, found.errors)) < 0.02
