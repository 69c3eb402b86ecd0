import math
from typing import Any

import msgspec
import numpy as np
import pytest
from report_factory import PACED, sweep

from dpsim import codec
from dpsim.harness.sweep.compare import compare
from dpsim.records.comparison import Comparison, SweepData
from dpsim.records.sweep import MeasuredPoint, PredictedPoint, Predictions, Results
from dpsim.report.sweep.saved import points, summary

FIXED_POINT_NAMES = {
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
    "measured_step_s",
    "measured_low_s",
    "measured_high_s",
    "predicted_step_s",
    "predicted_low_s",
    "predicted_high_s",
    "exposed_communication_s",
    "predicted_exposed_communication_s",
    "error",
    "noise",
    "calibrated_on",
    "extrapolated",
}


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return compare(*sweep())


def _with_runs(results: Results, points: list[MeasuredPoint]) -> Results:
    return msgspec.structs.replace(results, points=tuple(points))


def _sealed(predictions: Predictions, results: Results) -> tuple[Predictions, Results]:
    return predictions, msgspec.structs.replace(results, predictions_sha256=codec.digest(predictions))


def test_points_carry_the_names_programs_rely_on(compared: Comparison) -> None:
    for point in points(SweepData(*sweep(), compared)):
        assert set(point) >= FIXED_POINT_NAMES
    assert {p["fusion_threshold_bytes"] for p in points(SweepData(*sweep(), compared))} >= {"inf", 0.0}


def test_summary_carries_the_names_programs_rely_on(compared: Comparison) -> None:
    printed = summary(SweepData(*sweep(), compared))
    for network in printed["networks"]:
        for name in ("median_abs_error", "p90_abs_error", "null_median_abs_error", "skill", "regret", "regret_spread"):
            assert isinstance(network[name], float)
    assert not {"skill", "regret", "null"} & printed.keys(), "scores are of a network, never of several"
    assert codec.to_json(printed)


def test_error_is_predicted_over_measured_minus_one(compared: Comparison) -> None:
    for p in compared.points:
        assert p.error == pytest.approx(p.predicted_step_s / p.measured_step_s - 1)


def test_twins_are_pooled_and_their_difference_is_the_groups_noise() -> None:
    predictions, results = sweep(networks=("node",))
    runs = list(results.points)
    for i, run in enumerate(runs):
        if run.setting.plan.devices == 2:
            runs[i] = msgspec.structs.replace(run, step_s=(0.0102 if run.setting.repeat else 0.0100,) * len(run.step_s))
    actual = compare(predictions, _with_runs(results, runs))
    twin = next(p for p in actual.scored if p.repeat == 2)
    assert twin.samples == 96
    assert [p.noise for p in actual.points if p.devices == 2] == [pytest.approx(0.02)] * 14
    assert len([p for p in actual.scored if p.devices == 2]) == 7


def test_the_overlap_predicted_fastest_is_the_one_that_is_scored() -> None:
    predictions, results = sweep()
    assert compare(predictions, results).chosen_overlap == {"node": "thread", PACED: "thread"}
    other = msgspec.structs.replace(
        predictions, mechanisms={"node": {"off": 1.0, "thread": 2.0}, PACED: predictions.mechanisms[PACED]}
    )
    actual = compare(*_sealed(other, results))
    assert actual.chosen_overlap["node"] == "off"
    assert {p.overlap for p in actual.scored if p.network == "node"} == {"off"}


def test_without_a_stated_mechanism_the_overlap_with_most_points_is_scored() -> None:
    predictions, results = sweep()
    actual = compare(*_sealed(msgspec.structs.replace(predictions, mechanisms={}), results))
    assert set(actual.chosen_overlap.values()) == {"thread"}


def test_speedup_is_over_one_device_at_the_same_global_batch(compared: Comparison) -> None:
    one = next(p for p in compared.points if p.devices == 1 and p.network == PACED)
    for p in compared.points:
        if p.network == PACED:
            assert p.measured_speedup == pytest.approx(one.measured_step_s / p.measured_step_s)
            assert p.efficiency == pytest.approx(one.measured_step_s / p.measured_step_s / p.devices)


def test_speedup_under_weak_scaling_is_that_of_throughput() -> None:
    predictions, results = sweep(networks=("node",))
    base = {name: value for name, value in predictions.experiment.base.items() if name != "global_batch"}
    weak = msgspec.structs.replace(predictions.experiment, base=base | {"local_batch": 32})
    predictions, results = (
        msgspec.structs.replace(record, experiment=weak, points=tuple(map(_at_local_batch_32, record.points)))
        for record in (predictions, results)
    )
    actual = compare(*_sealed(predictions, results))
    one = next(p for p in actual.points if p.devices == 1)
    for p in actual.points:
        assert p.measured_speedup == pytest.approx(p.devices * one.measured_step_s / p.measured_step_s)
        assert p.predicted_speedup == pytest.approx(p.devices * one.predicted_step_s / p.predicted_step_s)


def _at_local_batch_32(point: Any) -> Any:
    plan = point.setting.plan
    plan = msgspec.structs.replace(plan, global_batch=32 * plan.devices)
    return msgspec.structs.replace(point, setting=msgspec.structs.replace(point.setting, plan=plan))


def test_one_device_measured_under_one_network_serves_the_others() -> None:
    predictions, results = sweep()
    runs = [r for r in results.points if not (r.setting.plan.devices == 1 and r.setting.network == PACED)]
    actual = compare(predictions, _with_runs(results, runs))
    assert all(p.measured_speedup is not None for p in actual.points)
    assert len(actual.not_measured) == 1


def test_the_constant_null_is_the_median_of_the_groups_measured_steps_and_counts_for_the_shape(
    compared: Comparison,
) -> None:
    for group in compared.groups:
        members = compared.members(group)
        times = np.array([p.measured_step_s for p in members])
        assert members[0].null_step_s["constant"] == pytest.approx(np.median(times))
        assert group.shape is not None
        assert group.shape.null_errors["constant"] == pytest.approx(np.median(np.abs(times.mean() / times - 1)))
        assert "constant" not in group.step.null_errors


def test_what_is_common_to_a_panel_changes_its_errors_but_not_the_score_of_its_shape() -> None:
    predictions, results = sweep(networks=("node",))
    slower = [msgspec.structs.replace(run, step_s=tuple(1.3 * s for s in run.step_s)) for run in results.points]
    before, after = (compare(predictions, each).groups[0] for each in (results, _with_runs(results, slower)))
    assert before.shape is not None and after.shape is not None
    assert after.shape.median_abs_error == pytest.approx(before.shape.median_abs_error)
    assert after.shape.null_errors == pytest.approx(before.shape.null_errors)
    assert after.median_error < before.median_error - 0.1


def test_skill_is_one_minus_model_over_best_null(compared: Comparison) -> None:
    for group in compared.groups:
        assert group.shape is not None
        for score in (group.step, group.shape, group.exposed_communication):
            hindsight = set() if score is group.step else {"constant"}
            assert set(score.null_errors) == hindsight | {
                "perfect_scaling",
                "alpha_beta_no_overlap",
                "largest_bucket",
                "free_communication",
            }
            best = min(score.null_errors.values())
            assert score.null_median_abs_error == best == score.null_errors[score.null]
            assert score.skill == pytest.approx(1 - score.median_abs_error / best)


def test_one_device_is_scored_apart(compared: Comparison) -> None:
    assert all(g.devices > 1 for g in compared.groups)
    assert compared.single_device_median_abs_error is not None
    only = compare(*sweep(devices=(1,)))
    assert only.groups == ()
    assert summary(SweepData(*sweep(devices=(1,)), only))["networks"] == []


def test_emulated_networks_are_marked_and_scored_apart(compared: Comparison) -> None:
    assert {(p.network, p.emulated_network) for p in compared.points} == {("node", False), (PACED, True)}
    assert [(n.network, n.emulated_network) for n in compared.networks] == [("node", False), (PACED, True)]


def test_regret_is_taken_on_rounds_that_did_not_choose_the_best() -> None:
    """A setting that is fast in every other round must not be its own yardstick there."""
    predictions, results = sweep(networks=("node",), overlaps=("thread",))
    runs = []
    for run in results.points:
        if run.setting.plan.devices == 2:
            lucky = run.setting.plan.fusion_threshold_bytes == 4096.0
            steps = tuple((0.004 if r % 2 == 0 else 0.012) if lucky else 0.008 for r in run.round)
            run = msgspec.structs.replace(run, step_s=steps)
        runs.append(run)
    group = compare(predictions, _with_runs(results, runs)).groups[0]
    assert group.regret_halves == 200 and group.regret_seed == 0
    assert 0.008 / 0.012 - 1 < group.regret < 0.0 and group.regret_spread > 0.05


def _moved(point: PredictedPoint, factor: float) -> PredictedPoint:
    """A prediction and its interval, times a factor."""
    ends = {name: factor * getattr(point, name) for name in ("step_s", "low_s", "high_s")}
    return msgspec.structs.replace(point, **ends)


def test_regret_of_a_wrong_prediction_is_what_it_costs() -> None:
    predictions, results = sweep(networks=(PACED,), overlaps=("thread",), noise=1e-9)
    wrong = tuple(
        msgspec.structs.replace(p, step_s=1e-3, low_s=1e-3, high_s=1e-3)
        if p.setting.plan.fusion_threshold_bytes == math.inf
        else p
        for p in predictions.points
    )
    actual = compare(*_sealed(msgspec.structs.replace(predictions, points=wrong), results))
    group = actual.groups[0]
    best = next(p for p in actual.scored if p.is_best_measured)
    chosen = next(p for p in actual.scored if p.is_best_predicted)
    assert chosen.fusion_threshold_bytes == math.inf == group.best_predicted_threshold_bytes
    assert group.regret == pytest.approx(chosen.measured_step_s / best.measured_step_s - 1, rel=1e-6)
    assert actual.networks[0].regret == group.regret


def test_too_few_rounds_for_halves_is_said() -> None:
    actual = compare(*sweep(rounds=1))
    assert not any(g.regret_halves for g in actual.groups)
    assert all(g.regret >= 0 for g in actual.groups)


def test_overlap_signs_are_judged_only_beyond_the_noise(compared: Comparison) -> None:
    assert compared.overlap
    for effect in compared.overlap:
        if abs(effect.measured_effect) <= effect.noise:
            assert effect.sign_right is None
        else:
            assert effect.sign_right is (effect.measured_effect * effect.predicted_effect > 0)
    assert True in {e.sign_right for e in compared.overlap}


def test_a_wrongly_predicted_sign_of_overlap_is_found() -> None:
    predictions, results = sweep(networks=(PACED,))
    slower = tuple(_moved(p, 2) if p.setting.plan.overlap == "thread" else p for p in predictions.points)
    actual = compare(*_sealed(msgspec.structs.replace(predictions, points=slower), results))
    assert False in {e.sign_right for e in actual.overlap}
    assert True not in {e.sign_right for e in actual.overlap}


def test_comparing_is_pure(compared: Comparison) -> None:
    assert compare(*sweep()) == compared
