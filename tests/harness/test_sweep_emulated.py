"""Emulated compute in sweeps: what is refused, how it is scored and labelled apart, and a small one on four ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import report_factory

from dpsim import codec
from dpsim.errors import ConfigError, DpsimError
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.questions import completed, group_name
from dpsim.harness.sweep.sweep import sweep
from dpsim.model import predict
from dpsim.records.sweep import Emulation, Experiment, Predictions, Results, read_predictions, read_results
from dpsim.report.sweep.facts import run_facts
from dpsim.report.sweep.warnings import warnings
from dpsim.report.words import network_name
from dpsim.setting import setting_of
from dpsim.study.emulation import MOST_LATENESS, VISITS_AT_MOST, EmulationLog, Watched, check_emulation

LINK = "paced:2ms,100mbit"
ROW = {"model": "mlp:8", "global_batch": 64, "devices": 4, "network": LINK, "compute": "emulated"}
GOOD = Emulation(lateness_s=1e-5, lateness_p95_s=1e-3, lateness_most_s=2e-3, free_cores=0.6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": "node"}, "emulated compute on the network node"),
        ({"compute": "imagined"}, "compute"),
        ({"leaves": 8}, "leaves is 8 with emulated compute"),
        ({"model": "cnn", "leaves": 8, "batch_norm": "leaf"}, "leaves is 8 with emulated compute"),
    ],
)
def test_what_emulated_compute_cannot_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        setting_of(ROW | changes)


def test_emulated_settings_are_a_training_and_a_group_of_their_own() -> None:
    emulated, real = setting_of(ROW), setting_of(ROW | {"compute": "real"})
    assert emulated.training != real.training and emulated.order != real.order and emulated.where != real.where
    base = {name: value for name, value in ROW.items() if name != "compute"}
    axes: dict[str, tuple[Any, ...]] = {"compute": ("real", "emulated"), "fusion_threshold_bytes": (0.0, "inf")}
    experiment = completed(Experiment(base=base, axes=axes))
    groups = [group_name(experiment, setting_of(row)) for row in experiment.rows]
    assert groups == [f"{LINK}; real compute"] * 2 + [f"{LINK}; emulated compute"] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"free_cores": 0.1}, "the cores are free for 10% of the time"),
        ({"lateness_s": 1e-3}, "layers end 10.0% of a step too late"),
    ],
)
def test_ranks_that_wait_for_cores_are_refused(changes: dict[str, float], message: str) -> None:
    check_emulation(GOOD, setting_of(ROW), 1e-2)
    with pytest.raises(DpsimError, match=message):
        check_emulation(msgspec.structs.replace(GOOD, **changes), setting_of(ROW), 1e-2)


def test_a_visit_tells_the_free_time_of_the_cores_and_the_lateness() -> None:
    log = EmulationLog(GOOD)
    assert log.result() == GOOD
    ranks = [Watched(0.0, 1.0, 0.25, [1e-4, 2e-4]), Watched(0.5, 2.0, 0.75, [3e-4])]
    log.visited(ranks, 2)
    seen = log.result()
    assert seen is not None
    assert (seen.free_cores, seen.lateness_s, seen.lateness_most_s) == (0.75, 2e-4, 3e-4)
    log.check(setting_of(ROW), [1e-3])  # one visit is too little to refuse a run
    log.visited(ranks, 2)
    log.visited(ranks, 2)
    with pytest.raises(DpsimError, match="too late"):
        log.check(setting_of(ROW), [1e-3])


def watched(*, cpu_s: float, late_s: float) -> list[Watched]:
    """A visit of two ranks and 6 s."""
    return [Watched(0.0, 6.0, cpu_s, [late_s] * 3) for _ in range(2)]


def test_a_visit_that_others_made_late_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    log = EmulationLog()
    step_s, cores = 1.0, 2
    late_s = 1.1 * MOST_LATENESS * step_s
    assert [log.repeats(watched(cpu_s=0.1, late_s=late_s), cores, attempt) for attempt in range(VISITS_AT_MOST)] == [
        *[True] * (VISITS_AT_MOST - 1),
        False,
    ]
    assert len(pauses) == VISITS_AT_MOST - 1
    assert not log.repeats(watched(cpu_s=0.1, late_s=0.9 * MOST_LATENESS * step_s), cores, 0), "in time"
    assert not log.repeats(watched(cpu_s=5.9, late_s=late_s), cores, 0), "the ranks themselves used the cores"
    assert not log.repeats([], cores, 0), "ranks that compute keep no times"
    log.visited(watched(cpu_s=0.1, late_s=0.0), cores)
    seen = log.result()
    assert seen is not None and seen.repeated_visits == VISITS_AT_MOST - 1
    assert EmulationLog(seen).result() == seen


def half_emulated() -> tuple[Predictions, Results]:
    """The made-up sweep with emulated compute on its emulated link."""
    predictions, results = report_factory.sweep()

    def changed(point: Any, **values: Any) -> Any:
        if point.setting.network != report_factory.PACED:
            return point
        return msgspec.structs.replace(
            point, setting=msgspec.structs.replace(point.setting, compute="emulated"), **values
        )

    workload = msgspec.structs.replace(predictions.workloads[0], emulated_compute=True)
    predictions = msgspec.structs.replace(
        predictions,
        workloads=(*predictions.workloads, workload),
        points=tuple(changed(point, workload=1) for point in predictions.points),
    )
    points = tuple(changed(point, emulation=GOOD) for point in results.points)
    return predictions, msgspec.structs.replace(results, points=points, predictions_sha256=codec.digest(predictions))


def test_emulated_compute_is_scored_apart_and_labelled() -> None:
    predictions, results = half_emulated()
    comparison = compare(predictions, results)
    of_place = {network.emulated_compute: network for network in comparison.networks}
    assert set(of_place) == {False, True}
    for point in comparison.points:
        emulated = point.network == report_factory.PACED
        assert point.emulated_compute is emulated
        assert ("as is computation" in network_name(point)) is emulated
        assert point.free_cores == (0.6 if emulated else None)
        assert point.deadline_lateness == (pytest.approx(1e-5 / point.measured_step_s) if emulated else None)
    said = dict(run_facts(comparison, predictions, results))["emulated computation"]
    assert "waited for the profiled times" in said and "60.0%" in said and "made again" not in said
    seen = msgspec.structs.replace(GOOD, repeated_visits=2)
    first = next(point for point in results.points if point.emulation)
    repeated = tuple(
        msgspec.structs.replace(point, emulation=seen) if point is first else point for point in results.points
    )
    results = msgspec.structs.replace(results, points=repeated)
    assert "2 visits were made again" in dict(run_facts(comparison, predictions, results))["emulated computation"]


def test_devices_that_wait_share_no_cores() -> None:
    comparison = compare(*half_emulated())
    one_core = msgspec.structs.replace(comparison, cores=1)
    assert any(warning.kind == "shared-cores" for warning in warnings(one_core))
    emulated = tuple(point for point in comparison.points if point.emulated_compute)
    assert not any(
        warning.kind == "shared-cores" for warning in warnings(msgspec.structs.replace(one_core, points=emulated))
    )


@pytest.mark.slow
def test_four_ranks_that_wait_are_predicted_and_measured(tmp_path: Path) -> None:
    base = {"model": "mlp:32x2", "local_batch": 256, "network": LINK, "overlap": "thread", "compute": "emulated"}
    experiment = Experiment(base=base, axes={"devices": (1, 2, 4)}, budget_s=2.0, interval=1e-6)
    try:
        comparison = sweep(experiment, tmp_path / "emulated", lambda text: None).comparison
    except DpsimError as error:
        if "too late" not in str(error):
            raise
        pytest.skip(f"other programs had the cores throughout: {error}")
    predictions, results = (
        read_predictions(tmp_path / "emulated" / "predictions.json"),
        read_results(tmp_path / "emulated" / "results.json"),
    )
    assert {point.devices for point in comparison.points} == {1, 2, 4}
    for point, measured in zip(comparison.points, results.points, strict=False):
        assert point.emulated_compute and point.emulated_network
        assert measured.emulation is not None
        assert measured.timeline is not None and measured.timeline.emulated_compute
    for predicted in predictions.points:
        workload, machine = predictions.workloads[predicted.workload], predictions.machines[predicted.machine]
        assert workload.emulated_compute and machine.cores == 0
        assert predict(workload, machine, predicted.setting.plan).step_s == pytest.approx(predicted.step_s)
    latency_s = 2e-3
    for measured in results.points:  # whoever comes last waits for half of a ring's 2 (n - 1) rounds at least
        rounds = measured.setting.plan.devices - 1
        assert min(measured.exposed_communication_s) >= 0.9 * rounds * latency_s
