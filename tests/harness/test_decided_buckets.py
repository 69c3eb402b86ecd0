"""Buckets tell settings apart, and those that a rule decides by costs are decided once, for both predictions."""

from __future__ import annotations

import math

import msgspec
from report_factory import ENVIRONMENT

from dpsim import codec
from dpsim.experiments.bench_predict import machine, resnet50
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.experiment import predict_again, predict_experiment
from dpsim.harness.sweep.questions import completed
from dpsim.machine import Machine
from dpsim.model.step import scheduled
from dpsim.records.sweep import Experiment, MeasuredPoint, Predictions, Results
from dpsim.report.sweep.content import answers, tables
from dpsim.setting import settings_of
from dpsim.study.inputs import Prepared

EXPERIMENT = completed(
    Experiment(
        question="settings",
        base={"model": "cnn", "global_batch": 64, "algorithm": "mpi", "overlap": "off", "fusion_rule": "mg-wfbp"},
        axes={"devices": (1, 2)},
    )
)


def slow(latency_s: float) -> Machine:
    table = machine(2).allreduce[0]
    times_s = tuple(latency_s + each for each in table.time_s)
    return Machine(name="slow", allreduce=(msgspec.structs.replace(table, time_s=times_s),))


def beforehand() -> Predictions:
    prepared = Prepared.for_all(settings_of(EXPERIMENT.rows), resnet50(), slow(0.0))
    return predict_experiment(EXPERIMENT, prepared, ENVIRONMENT)


def test_a_slower_network_in_the_same_minutes_changes_prices_and_no_buckets() -> None:
    before = beforehand()
    later = Prepared.for_all(settings_of(EXPERIMENT.rows), resnet50(), slow(0.1))
    again = predict_again(before, later)
    for first, second in zip(before.points, again.points, strict=True):
        assert second.buckets == first.buckets
        if first.setting.plan.devices == 2:
            assert second.step_s > first.step_s + 0.1 * (first.buckets - 1)
            alone = scheduled(resnet50(), slow(0.1), first.setting.plan)
            assert alone.buckets != first.buckets  # what the later costs would decide


def test_what_is_trained_follows_from_the_saved_predictions() -> None:
    saved = codec.decode(codec.to_builtins(beforehand()), Predictions, "predictions")
    for point in saved.points:
        if point.setting.plan.devices == 2:
            trained = scheduled(saved.workloads[point.workload], saved.machines[point.machine], point.setting.plan)
            assert trained.buckets == point.buckets
            (decided,) = saved.machines[point.machine].fusion_costs
            assert len(decided.ready_s) == len(resnet50().tensors)


def test_records_from_before_costs_were_kept_decide_by_their_own_machines() -> None:
    before = beforehand()
    machines = tuple(msgspec.structs.replace(each, fusion_costs=()) for each in before.machines)
    later = Prepared.for_all(settings_of(EXPERIMENT.rows), resnet50(), slow(0.1))
    again = predict_again(msgspec.structs.replace(before, machines=machines), later)
    assert [point.buckets for point in again.points] == [point.buckets for point in before.points]


CASES: tuple[dict[str, object], ...] = (
    {"fusion_rule": "per-tensor"},
    {"fusion_rule": "tarantella", "fusion_threshold_bytes": 0.0},
    {"fusion_rule": "tarantella", "fusion_threshold_bytes": math.inf},
    {"fusion_rule": "horovod", "fusion_threshold_bytes": math.inf},
    {"fusion_rule": "one"},
    {"fusion_rule": "mg-wfbp"},
)


def of_cases(cases: tuple[dict[str, object], ...], latency_s: float = 10.0) -> Predictions:
    base = {"model": "cnn", "global_batch": 64, "algorithm": "mpi", "overlap": "off", "devices": 2}
    grid = completed(Experiment(question="settings", base=base, cases=cases))
    return predict_experiment(grid, Prepared.for_all(settings_of(grid.rows), resnet50(), slow(latency_s)), ENVIRONMENT)


def test_rules_and_thresholds_that_make_the_same_buckets_are_one_setting() -> None:
    predictions = of_cases(CASES)
    first_runs = [point for point in predictions.points if not point.setting.repeat]
    rules = [[each.plan.fusion_rule for each in (point.setting, *point.same_buckets)] for point in first_runs]
    assert rules == [["per-tensor", "tarantella"], ["tarantella", "one", "mg-wfbp"], ["horovod"]]
    twins = [point.setting.plan.fusion_rule for point in predictions.points if point.setting.repeat]
    assert twins == ["per-tensor", "horovod"]
    again = predict_again(predictions, Prepared.for_all(settings_of(predictions.experiment.rows), resnet50(), slow(1)))
    assert [point.same_buckets for point in again.points] == [point.same_buckets for point in predictions.points]


def test_what_a_rule_decides_by_costs_is_a_setting_of_its_own_where_its_buckets_differ() -> None:
    predictions = of_cases(CASES[2:3] + CASES[5:], latency_s=0.0)
    assert {point.setting.plan.fusion_rule for point in predictions.points} == {"tarantella", "mg-wfbp"}
    assert not any(point.same_buckets for point in predictions.points)


def test_a_report_names_all_settings_with_the_same_buckets_and_calls_them_one() -> None:
    predictions = of_cases(CASES)
    points = [
        MeasuredPoint(
            setting=point.setting,
            buckets=point.buckets,
            step_s=(point.step_s,) * 12,
            exposed_communication_s=(0.0,) * 12,
            round=tuple(range(12)),
            losses=(),
        )
        for point in predictions.points
    ]
    results = Results(
        experiment=predictions.experiment,
        environment=ENVIRONMENT,
        predictions_sha256=codec.digest(predictions),
        predicted_at=predictions.predicted_at,
        measured_from=predictions.predicted_at,
        measured_until=predictions.predicted_at,
        points=tuple(points),
    )
    comparison = compare(predictions, results)
    assert {point.same_buckets for point in comparison.points} == {"tarantella at 0", "one, mg-wfbp", ""}
    text = answers(comparison)
    assert any("fusion rule tarantella, one, mg-wfbp" in each and "trained fastest" in each for each in text)
    assert (
        "per-tensor and tarantella at 0 make the same buckets: they are one setting, which was measured once." in text
    )
    (section,) = tables(comparison)[0].sections
    assert any("tarantella, one, mg-wfbp" in row for row in section.rows)
