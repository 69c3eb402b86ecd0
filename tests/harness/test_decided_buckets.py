"""Buckets that a rule decides by costs are decided once: both predictions price those that are trained."""

from __future__ import annotations

import msgspec
from report_factory import ENVIRONMENT

from dpsim import codec
from dpsim.experiments.bench_predict import machine, resnet50
from dpsim.harness.sweep.experiment import predict_again, predict_experiment
from dpsim.harness.sweep.questions import completed
from dpsim.machine import Machine
from dpsim.model.step import scheduled
from dpsim.records.sweep import Experiment, Predictions
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
