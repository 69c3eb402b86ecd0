"""Advice: the search finds what pricing everything finds, and says what does not fit, is refused or is undecided."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_training import machine, workload

from dpsim.errors import ConfigError
from dpsim.machine import Link, Machine
from dpsim.model import memory, price, scheduled
from dpsim.model.advise import Advice, advise
from dpsim.plan import Plan
from dpsim.report import advice as report
from dpsim.setting import Grid
from dpsim.strategy import SYNCHRONOUS, DataParallel, Pipeline
from dpsim.workload import Workload

KIB = 1024


def asked(
    known: Machine | None = None,
    of: Workload | None = None,
    devices: int | str = 4,
    *,
    every: bool = False,
    **more: Any,
) -> Advice:
    grid = Grid.of(devices=devices, **{"global_batch": 32, "algorithm": "ring"} | more)
    return advise(of or workload(), known or machine(), grid, every=every)


@functools.cache
def _spacious() -> Advice:
    return asked(every=True)


@given(
    latency_s=st.sampled_from([1e-6, 1e-4, 1e-3]),
    bandwidth=st.sampled_from([1e7, 1e8, 1e10]),
    share=st.floats(0.4, 1.1),
    devices=st.sampled_from([2, 4]),
)
@settings(max_examples=12, deadline=None)
def test_the_best_of_each_strategy_is_that_of_all_candidates(
    latency_s: float, bandwidth: float, share: float, devices: int
) -> None:
    """With so much memory that all, some or none of the plans fit."""
    largest = max(each.memory.total for each in _spacious().candidates)
    known = machine(latency_s, bandwidth, memory_bytes=share * largest)
    searched, every = asked(known, devices=devices), asked(known, devices=devices, every=True)
    assert [choice.rank for choice in searched.choices] == [choice.rank for choice in every.choices]
    assert {each.plan for each in searched.candidates} <= {each.plan for each in every.candidates}
    for candidate in every.candidates:
        fits = memory(workload(), candidate.plan, known).total <= known.memory_bytes
        assert candidate.memory.fits is fits
        assert candidate.step_s == price(scheduled(workload(), known, candidate.plan), known).step_s
    fitting = [each.step_s for each in every.candidates if each.memory.fits]
    assert (every.advised is None) == (not fitting)
    if every.advised is not None:
        plain = every.plain.memory.fits and every.plain.step_s <= 1.02 * min(fitting)
        assert every.advised.step_s == (every.plain.step_s if plain else min(fitting))
        assert every.advised is every.plain or not plain


def strategies_refused(advice: Advice) -> list[str]:
    return [strategy for refusal in advice.refusals for strategy in refusal.strategies]


def test_all_candidates_are_what_the_settings_make_of_each_other() -> None:
    """Every threshold with every overlap; a pipeline's devices of a stage alone have neither.

    The rule's own 32 KiB makes one bucket a tensor, as all smaller thresholds do: each list of buckets is priced once.
    """
    plans = [each.plan for each in _spacious().candidates]
    assert len(plans) == len({*plans})
    of_all = {plan.parallelism for plan in plans}
    assert {plan.parallelism.name for plan in plans} == {*SYNCHRONOUS} - {"tensor"}, "there are no column blocks"
    assert Pipeline(stages=2, shard=True) in of_all and Pipeline(stages=4, shard=True) not in of_all
    plain = [plan for plan in plans if plan.parallelism == DataParallel()]
    thresholds = {None, 64.0 * KIB, 128.0 * KIB}
    expected = {(threshold, overlap) for threshold in thresholds for overlap in ("off", "inline", "thread")}
    assert {(plan.fusion_threshold_bytes, plan.overlap) for plan in plain} == expected
    assert {plan.accumulate for plan in plans if plan.parallelism == Pipeline()} == {1, 2, 4, 8}
    assert {plan.accumulate for plan in plans if plan.parallelism.classes == 1} == {1}
    assert not any(getattr(each, "recompute", False) for each in of_all), "all fit without"


def test_a_copy_in_each_node_is_advised_where_the_nodes_are_far_apart() -> None:
    inside = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e10)
    known = msgspec.structs.replace(machine(1e-4, 1e7), allreduce=(), overlap=(), link_in_node=inside)
    plans = {devices: [each.plan for each in asked(known, devices=devices).choices] for devices in ("2x2", 4)}
    strategies = [next(each for each in of if each.parallelism.name == "zero3").parallelism for of in plans.values()]
    assert [each.replicas for each in strategies] == [2, 1]


def test_plain_data_parallelism_wins_on_a_fast_network_and_loses_where_memory_is_tight() -> None:
    fast = asked(machine(1e-6, 1e11), of=workload(update_s=0.0))
    assert fast.advised is fast.plain and fast.plain.step_s == min(c.step_s for c in fast.candidates)
    needed = fast.plain.memory.total
    tight = asked(machine(1e-6, 1e11, memory_bytes=0.85 * needed), of=workload(activations=0.1, update_s=0.0))
    assert tight.advised is not None and tight.advised is not tight.plain
    assert tight.advised.memory.total <= 0.85 * needed
    assert tight.advised.plan.parallelism.sharded or tight.advised.plan.parallelism.classes > 1
    text = " ".join(report.sentences(tight, workload()))
    assert "Plain data parallelism does not fit: it needs at least" in text
    assert "of the plans that fit" in text


def test_a_strategy_that_gains_less_than_predictions_err_by_is_named_and_not_advised() -> None:
    """ZeRO saves a part of the update, in which the plain one gains nothing."""
    large, small = (asked(machine(1e-6, 1e11), of=workload(update_s=update_s)) for update_s in (4e-3, 2e-4))
    assert large.advised is not None and large.advised is not large.plain and large.advised is large.choices[0]
    assert small.advised is small.plain is small.choices[0]
    fastest = min(small.choices[1:], key=lambda choice: choice.step_s)
    assert fastest is small.choices[1] and fastest.step_s < small.plain.step_s
    (said, *_) = report.sentences(small, workload())
    assert said.startswith("The advice is plain data parallelism, with ")
    assert f"The fastest is {fastest.plan.strategy}, by " in said


def test_activations_that_do_not_fit_are_divided_into_micro_batches() -> None:
    of = workload(activations=1e6)
    whole = asked(of=of).plain.memory
    assert whole.activations == 8 * 4e6
    divided = asked(machine(memory_bytes=whole.total / 2), of=of)
    assert divided.plain.memory.fits and divided.plain.plan.accumulate == 4


def test_what_fits_nowhere_is_said_first_with_the_least_memory_that_a_plan_needs() -> None:
    nothing = asked(machine(memory_bytes=1000.0))
    least = min(asked(machine(memory_bytes=1000.0), every=True).candidates, key=lambda each: each.memory.total)
    assert nothing.advised is None and nothing.over_plain is None and not nothing.equally_fast
    said = report.nothing_fits(nothing)
    assert said.startswith("Nothing fits into the 1000 B that a device has.")
    assert nothing.choices[0].memory.total == least.memory.total
    assert report.summary(nothing, workload())["least_memory_bytes"] == least.memory.total
    assert all(row["fits"] is False for row in report.records(nothing, every=False))


@pytest.mark.parametrize(
    ("known", "of", "reason"),
    [
        (machine(memory_bytes=float("inf")), workload(), "the machine file states no memory_bytes"),
        (machine(), workload(activations=0.0), "states activation_bytes_per_sample"),
    ],
)
def test_whether_a_plan_fits_is_not_known_without_memory_or_activations(
    known: Machine, of: Workload, reason: str
) -> None:
    advice = asked(known, of=of)
    assert {each.memory.fits for each in advice.candidates} == {None}
    text = " ".join(report.sentences(advice, of))
    assert reason in text and "of the plans that fit" not in text


@pytest.mark.parametrize(
    ("of", "settings", "refused", "reason"),
    [
        (workload(), {"algorithm": "recursive-doubling"}, {"zero1", "zero2", "zero3"}, "there is no reduce-scatter"),
        (workload(3), {}, {"pipeline:stages=4"}, ""),
        (workload(), {"devices": 7, "global_batch": 28}, {"pipeline"}, "do not fill its stages or parts evenly"),
    ],
)
def test_strategies_that_cannot_be_used_are_named_with_the_reason(
    of: Workload, settings: dict[str, Any], refused: set[str], reason: str
) -> None:
    advice = asked(of=of, **settings)
    named = {*strategies_refused(advice)}
    possible = {each.plan.strategy for each in advice.candidates}
    assert not named & possible
    if reason:
        assert refused <= named
        assert any(reason in sentence for sentence in report.sentences(advice, of))
    else:
        assert not refused & (named | possible), "more stages than layers are no candidates"


def test_layers_of_unknown_outputs_and_layers_that_cannot_be_cut_refuse_pipelines() -> None:
    silent = tuple(msgspec.structs.replace(layer, output_bytes_per_sample=0.0) for layer in workload().layers)
    around = [*workload().layers]
    around[3] = msgspec.structs.replace(around[3], depends_on=("l2", "l0"))
    for layers, reason in ((silent, "output_bytes_per_sample"), (tuple(around), "stages for it")):
        of = workload(layers=1)
        of = msgspec.structs.replace(of, layers=layers)
        advice = asked(of=of)
        refused = [refusal for refusal in advice.refusals if reason in str(refusal.error)]
        assert any("pipeline:stages=4" in refusal.strategies for refusal in refused), advice.refusals


def test_a_strategy_that_is_refused_with_some_micro_batches_alone_is_not_named() -> None:
    advice = asked(leaves=4, batch_norm="leaf")
    assert {*strategies_refused(advice)} == {"tensor", "tensor:shard=yes"}, "the workload has no column blocks"
    assert {each.plan.accumulate for each in asked(leaves=4, batch_norm="leaf", every=True).candidates} == {1, 2, 4}


def test_strategies_that_cannot_be_told_apart_are_named_with_the_measurement_that_would_decide() -> None:
    """On a network that takes no time ZeRO is faster by its update alone, which is short here."""
    of = workload(update_s=1e-6, relative_uncertainty=0.3)
    close = asked(machine(1e-7, 1e12), of=of)
    text = " ".join(report.sentences(close, of))
    assert close.equally_fast and "may be as fast: the intervals overlap" in text
    assert report.measurement(close, of) in text
    apart = asked(machine(1e-3, 1e7), algorithm="recursive-doubling")
    assert not apart.equally_fast and apart.undecided is None and report.measurement(apart, of) is None


@pytest.mark.parametrize(
    ("of", "uncertain", "command"),
    [
        (workload(source="dpsim profile: x", name="cnn"), "compute", "dpsim profile --model cnn --local-batch"),
        (workload(), "compute", "dpsim profile --torch-script train.py --local-batch"),
        (workload(), "network", "dpsim calibrate --network node --devices 4 --algorithm ring --strategy"),
        (workload(), "speed", "--budget 60s"),
        (
            workload(source="dpsim profile: x", name="cnn"),
            "model",
            "--model cnn --devices 4 --global-batch 32 --steps 50",
        ),
        (workload(), "model", "dpsim sweep --torch-script train.py --devices 4 --strategy zero3"),
    ],
)
def test_each_uncertainty_has_a_command_to_paste(
    of: Workload, uncertain: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = asked(machine(1e-7, 1e12), of=of)
    monkeypatch.setattr(Advice, "undecided", property(lambda _: uncertain))
    assert command in str(report.measurement(close, of))


def test_flags_are_those_that_make_the_plan() -> None:
    plan = Plan(
        devices=4,
        global_batch=32,
        strategy="pipeline:stages=2,recompute=yes",
        accumulate=8,
        fusion_threshold_bytes=4.0 * KIB,
        overlap="thread",
    )
    expected = "--strategy pipeline:recompute=yes --accumulate 8 --fusion-threshold 4KiB --set overlap=thread"
    assert report.typed(plan) == expected
    alone = msgspec.structs.replace(plan, strategy="pipeline:stages=4")
    assert report.typed(alone) == "--strategy pipeline:stages=4 --accumulate 8"


def test_a_layout_and_one_device() -> None:
    assert asked(devices="2x2").plain.plan.layout == "2x2"
    alone = asked(devices=1)
    assert any("pipeline" in refusal.strategies for refusal in alone.refusals)
    assert alone.plain.plan.overlap == "off"


def test_plans_that_feed_no_device_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match="cannot feed 4 devices"):
        asked(global_batch=3)
