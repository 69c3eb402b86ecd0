"""Several runs beside each other: the ratios of settings in common, their intervals, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import msgspec
import numpy as np
import pytest
from report_factory import PACED, sweep

from dpsim import codec
from dpsim.errors import ConfigError, DpsimError, FileFormatError
from dpsim.harness.bench.result import result
from dpsim.harness.compare.ratios import (
    compare_measured,
    compare_runs,
    draws,
    geometric_mean,
    medians,
    verdict,
)
from dpsim.harness.compare.runs import MeasuredRun, RoundSamples, bench_run, sweep_run, varied_fields
from dpsim.harness.sweep.compare import compare
from dpsim.optimizer import AdamW
from dpsim.records.bench import AllreduceBench, BenchRecord, Series, System
from dpsim.records.comparison import SweepData
from dpsim.records.run_comparison import RunComparison
from dpsim.records.sweep import MeasuredPoint, PredictedPoint, Predictions, Results

Records = tuple[Predictions, Results]
PUBLISHED = Path(__file__).parents[2] / "reports"
Point = TypeVar("Point", PredictedPoint, MeasuredPoint)


def changed(records: Records, factor: float = 1.0, **experiment: object) -> Records:
    """The records of a sweep with all steps ``factor`` times as long, and other fields of the experiment."""
    predictions, results = records
    declared = msgspec.structs.replace(predictions.experiment, **experiment)
    predictions = msgspec.structs.replace(predictions, experiment=declared)
    points = tuple(
        msgspec.structs.replace(
            point,
            step_s=tuple(factor * time_s for time_s in point.step_s),
        )
        for point in results.points
    )
    sha256 = codec.digest(predictions)
    return predictions, msgspec.structs.replace(results, experiment=declared, points=points, predictions_sha256=sha256)


def runs_of(*sweeps: Records) -> list[MeasuredRun]:
    saved = [SweepData(predictions, results, compare(predictions, results)) for predictions, results in sweeps]
    varied = varied_fields(saved)
    return [sweep_run(each, f"run{i}", "", varied) for i, each in enumerate(saved)]


def compared(*sweeps: Records) -> RunComparison:
    return compare_measured(runs_of(*sweeps))


def small(
    *,
    networks: tuple[str, ...] = ("node",),
    devices: tuple[int, ...] = (1, 2),
    seed: int = 1,
    overlaps: tuple[str, ...] = ("thread", "off"),
) -> Records:
    return sweep(networks=networks, devices=devices, rounds=6, seed=seed, timelines=False, overlaps=overlaps)


def with_optimizer(records: Records, optimizer: AdamW, overlaps: tuple[str, ...]) -> Records:
    """The records with another optimizer in the settings of some overlaps."""

    def other(point: Point) -> Point:
        setting = point.setting
        if setting.plan.overlap not in overlaps:
            return point
        plan = msgspec.structs.replace(setting.plan, optimizer=optimizer)
        return msgspec.structs.replace(point, setting=msgspec.structs.replace(setting, plan=plan))

    predictions, results = records
    predictions = msgspec.structs.replace(predictions, points=tuple(map(other, predictions.points)))
    points = tuple(map(other, results.points))
    sha256 = codec.digest(predictions)
    return predictions, msgspec.structs.replace(results, points=points, predictions_sha256=sha256)


def test_settings_are_joined_where_one_run_varies_the_optimizer_and_the_other_does_not() -> None:
    both = with_optimizer(small(devices=(2,), seed=1), AdamW(), ("off",))
    comparison = compared(both, small(devices=(2,), seed=2))
    assert comparison.points and all(point["setting"]["overlap"] == "thread" for point in comparison.points)
    assert all("optimizer" in point["setting"] for point in comparison.points)


def test_a_run_that_takes_twice_as_long_has_the_ratio_two_at_every_setting() -> None:
    comparison = compared(small(seed=1), changed(small(seed=2), 2.0))
    assert len(comparison.points) == 15 and not comparison.not_compared
    for point in comparison.points:
        assert point["ratio"] == pytest.approx(point["b_time_s"] / point["a_time_s"])
        assert point["ratio_low"] < point["ratio"] < point["ratio_high"] and abs(point["ratio"] - 2) < 0.1
        assert point["verdict"] == "slower"
    (pair,) = comparison.pairs
    assert (pair["overall"]["settings"], pair["overall"]["slower"]) == (15, 15)
    assert (
        pair["overall"]["low"] < 2 < pair["overall"]["high"] and pair["overall"]["high"] - pair["overall"]["low"] < 0.1
    )


def test_the_same_record_has_the_ratio_one_exactly() -> None:
    comparison = compared(small(), small())
    assert comparison.pairs[0]["same_record"]
    assert {(p["ratio"], p["ratio_low"], p["ratio_high"], p["verdict"]) for p in comparison.points} == {
        (1.0, 1.0, 1.0, "not_distinguishable")
    }


def test_two_runs_of_the_same_program_are_seldom_called_different() -> None:
    verdicts = [point["verdict"] for seed in (2, 3, 4) for point in compared(small(seed=1), small(seed=seed)).points]
    assert verdicts.count("not_distinguishable") > 0.8 * len(verdicts)


def test_a_ratio_within_the_noise_is_not_distinguishable() -> None:
    assert verdict(0.95, 0.94, 0.96, 0.01, 10) == "faster"
    assert verdict(0.95, 0.94, 0.96, None, 10) == "faster"
    assert verdict(0.95, 0.94, 0.96, 0.06, 10) == "not_distinguishable"
    assert verdict(0.8, 0.7, 0.9, 0.22, 10) == "faster"
    assert verdict(1 / 0.8, 1 / 0.9, 1 / 0.7, 0.22, 10) == "slower"
    assert verdict(1.05, 0.99, 1.06, 0.01, 10) == "not_distinguishable"
    assert verdict(1.05, 1.04, 1.06, 0.01, 2) == "not_distinguishable"
    assert verdict(1.05, 1.04, 1.06, 0.01, 3) == "slower"


def test_each_run_is_compared_with_the_first() -> None:
    comparison = compared(small(seed=1), changed(small(seed=2), 2.0), changed(small(seed=3), 0.5))
    assert [(pair["a"], pair["b"]) for pair in comparison.pairs] == [("run0", "run1"), ("run0", "run2")]
    assert [round(pair["overall"]["ratio"], 1) for pair in comparison.pairs] == [2.0, 0.5]


def test_settings_that_only_one_run_has_are_listed_with_the_reason() -> None:
    comparison = compared(small(overlaps=("thread", "off")), small(seed=2, overlaps=("thread",)))
    assert len(comparison.points) == 8 and len(comparison.not_compared) == 7
    assert {each["reason"] for each in comparison.not_compared} == {"only run0 measured it"}
    assert {each["setting"]["overlap"] for each in comparison.not_compared} == {"off"}


def test_an_emulated_network_is_not_compared_with_a_real_one() -> None:
    with pytest.raises(ConfigError, match="network is node in run0 and paced"):
        compared(small(), small(networks=(PACED,)))
    both = compared(small(), small(seed=2, networks=("node", PACED)))
    assert {point["setting"]["network"] for point in both.points} == {"node"}
    assert all("run0 has it on node: emulated and real" in each["reason"] for each in both.not_compared)


def test_a_setting_that_is_emulated_in_one_run_and_real_in_the_other_is_refused() -> None:
    predictions, results = small(seed=2)
    machines = tuple(msgspec.structs.replace(machine, emulated_network=True) for machine in predictions.machines)
    predictions = msgspec.structs.replace(predictions, machines=machines)
    results = msgspec.structs.replace(results, predictions_sha256=codec.digest(predictions))
    with pytest.raises(ConfigError, match="emulated in run1 and real in run0"):
        compared(small(), (predictions, results))


def test_settings_of_one_device_that_differ_in_communication_alone_are_kept_apart() -> None:
    def twice(points: tuple[Point, ...]) -> tuple[Point, ...]:
        (point,) = points
        plan = msgspec.structs.replace(point.setting.plan, fusion_threshold_bytes=math.inf)
        return point, msgspec.structs.replace(point, setting=msgspec.structs.replace(point.setting, plan=plan))

    def both(seed: int) -> Records:
        predictions, results = small(devices=(1,), seed=seed)
        predictions = msgspec.structs.replace(predictions, points=twice(predictions.points[:1]))
        points, sha256 = twice(results.points[:1]), codec.digest(predictions)
        return predictions, msgspec.structs.replace(results, points=points, predictions_sha256=sha256)

    points = compared(both(1), both(2)).points
    assert [point["setting"]["fusion_threshold_bytes"] for point in points] == [0.0, math.inf]
    assert (
        "fusion_threshold_bytes" not in compared(small(devices=(1,)), small(devices=(1,), seed=2)).points[0]["setting"]
    )


def test_settings_that_differ_in_who_trains_are_kept_apart() -> None:
    def by_ddp(point: Point) -> Point:
        plan = msgspec.structs.replace(point.setting.plan, fusion_rule="ddp", overlap="thread", algorithm="mpi")
        setting = msgspec.structs.replace(point.setting, plan=plan)
        return msgspec.structs.replace(point, setting=setting)

    def both(seed: int) -> Records:
        predictions, results = small(devices=(2,), seed=seed)
        ddp = [by_ddp(point) for point in (predictions.points[0], results.points[0])]
        other = [
            msgspec.structs.replace(p, setting=msgspec.structs.replace(p.setting, runtime="torch-ddp-mpi")) for p in ddp
        ]
        predictions = msgspec.structs.replace(predictions, points=(ddp[0], other[0]))
        sha256 = codec.digest(predictions)
        return predictions, msgspec.structs.replace(results, points=(ddp[1], other[1]), predictions_sha256=sha256)

    points = compared(both(1), both(2)).points
    assert [point["setting"].get("runtime") for point in points] == [None, "torch-ddp-mpi"]


def test_another_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="run0 trains on digits, and run1 on mnist:x"):
        compared(small(), changed(small(), dataset="mnist:x"))


def test_another_model_is_refused() -> None:
    predictions, results = small()

    def other(point: Point) -> Point:
        return msgspec.structs.replace(point, setting=msgspec.structs.replace(point.setting, model="mlp:8"))

    predictions = msgspec.structs.replace(predictions, points=tuple(map(other, predictions.points)))
    points = tuple(map(other, results.points))
    results = msgspec.structs.replace(results, points=points, predictions_sha256=codec.digest(predictions))
    with pytest.raises(ConfigError, match="model is cnn in run0 and mlp:8 in run1"):
        compared(small(), (predictions, results))


def test_the_fields_without_a_value_in_common_are_named() -> None:
    other = small(devices=(4,))
    with pytest.raises(ConfigError, match="devices is 2 in run0 and 4 in run1"):
        compared(small(devices=(2,)), other)


def test_the_resampled_medians_are_those_of_the_samples_of_the_drawn_rounds() -> None:
    rng = np.random.default_rng(0)
    samples = RoundSamples(rng.random(30), rng.integers(0, 7, 30))
    drawn = draws(8, seed=3)
    of_medians = medians(samples, drawn)
    assert (drawn.sum(axis=1) == 8).all()
    for number in range(50):
        repeated = np.repeat(samples.time_s, drawn[number][samples.round])
        assert of_medians[number] == pytest.approx(np.median(repeated))


def test_a_resample_without_a_round_of_a_setting_is_left_out_of_its_mean() -> None:
    samples = RoundSamples(np.array([1.0, 2.0]), np.array([0, 0]))
    drawn = np.array([[0, 2], [2, 0]])
    assert math.isnan(medians(samples, drawn)[0])
    assert geometric_mean(np.array([[np.nan, 2.0], [4.0, 8.0]])).tolist() == pytest.approx([4.0, 4.0])


def bench(factor: float, seed: int, *, wrong: int = 0) -> MeasuredRun:
    """The run of a benchmark that never took place: sums of 4 and 16 KiB in six rounds."""
    rng = np.random.default_rng(seed)
    series = []
    for size in (4096, 16384):
        for algorithm, repeat, default in (("two-shot", 0, True), ("two-shot", 1, False), ("ring", 0, False)):
            calls = rng.normal(factor * size, 0.01 * size, (6, 5)).astype(int).tolist()
            bad = wrong if algorithm == "ring" else 0
            series.append(
                Series(
                    size_bytes=size,
                    system="dpsim",
                    algorithm=algorithm,
                    in_place=True,
                    cached=False,
                    wrong=bad,
                    rounds_ns=() if bad else tuple(map(tuple, calls)),
                    repeat=repeat,
                    default=default,
                )
            )
    record = BenchRecord(
        bench=AllreduceBench(min_bytes=4096, max_bytes=16384),
        environment=small()[1].environment,
        systems=(System(name="dpsim", peer="dpsim", kind="dpsim"),),
        series=tuple(series),
        measured_from="2025-01-01T10:00:00Z",
        measured_until="2025-01-01T10:01:00Z",
    )
    return bench_run(result(record), f"factor {factor:g}", "")


def test_benchmarks_are_compared_by_size_and_algorithm() -> None:
    comparison = compare_measured([bench(1.0, 1), bench(1.5, 2)])
    assert [(p["setting"]["algorithm"], p["setting"]["size_bytes"]) for p in comparison.points] == [
        (algorithm, size) for size in (4096, 16384) for algorithm in ("two-shot", "ring")
    ]
    assert all(abs(point["ratio"] - 1.5) < 0.05 and point["verdict"] == "slower" for point in comparison.points)
    assert {(point["a_rounds"], point["a_samples"]) for point in comparison.points} == {(6, 30)}


def test_sums_that_were_wrong_are_not_compared() -> None:
    comparison = compare_measured([bench(1.0, 1), bench(1.5, 2, wrong=3)])
    assert {point["setting"]["algorithm"] for point in comparison.points} == {"two-shot"}
    assert ["its sums were wrong" in each["reason"] for each in comparison.not_compared] == [True, True]


def test_a_sweep_is_not_compared_with_a_benchmark() -> None:
    with pytest.raises(ConfigError, match="is a sweep and factor 1 is a benchmark"):
        compare_measured([*runs_of(small()), bench(1.0, 1)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    predictions, results = small()
    path = tmp_path / "sweep"
    codec.write(path / "predictions.json", predictions)
    codec.write(path / "results.json", results)
    return path


def _without(name: str) -> Callable[[Path], Path]:
    def edit(folder: Path) -> Path:
        (folder / name).unlink()
        return folder

    return edit


def _cut(folder: Path) -> Path:
    path = folder / "results.json"
    path.write_text(path.read_text()[:5000])
    return folder


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda folder: folder / "missing", "no file or folder"),
        (lambda folder: folder.parent, "holds no result of dpsim"),
        (_without("results.json"), "no results.json yet"),
        (_without("predictions.json"), "cannot read the predictions"),
        (_cut, "not valid JSON"),
        (lambda _: PUBLISHED / "reproducibility" / "plain", "holds bits, not times"),
        (lambda _: PUBLISHED / "batch-norm" / "quality", "no record that can be compared"),
    ],
)
def test_a_path_without_a_readable_record_is_refused(edit: Callable[[Path], Path], text: str, folder: Path) -> None:
    with pytest.raises(DpsimError, match=text):
        compare_runs([edit(folder), folder])


def test_a_training_has_no_samples_to_compare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpsim.harness.compare.runs.load", lambda _: SimpleNamespace(kind="train"))
    with pytest.raises(FileFormatError, match="one median step and no samples"):
        compare_runs([folder, folder])


@pytest.mark.parametrize(
    ("count", "labels", "text"),
    [
        (1, None, "1 result to compare"),
        (0, None, "0 results"),
        (2, ("a",), "for 2 runs"),
        (2, ("a", "a"), "for 2 runs"),
        (2, ("a", "b\x1b[2J"), "control characters"),
    ],
)
def test_labels_and_runs_are_checked(count: int, labels: tuple[str, ...] | None, text: str, folder: Path) -> None:
    with pytest.raises(DpsimError, match=text):
        compare_runs([folder] * count, labels)


def test_runs_are_named_by_their_folders_or_by_labels(folder: Path) -> None:
    both = [folder, folder / "results.json"]
    assert [run.label for run in compare_runs(both).runs] == [str(folder), str(both[1])]
    assert [run.label for run in compare_runs([folder, folder]).runs] == [str(folder), f"{folder} (2)"]
    assert [run.label for run in compare_runs(both, ("before", "after")).runs] == ["before", "after"]


def test_a_rule_without_a_threshold_is_compared_without_one() -> None:
    predictions, results = small(devices=(2,), overlaps=("off",))

    def mg_wfbp(point: Point) -> Point:
        plan = msgspec.structs.replace(point.setting.plan, fusion_rule="mg-wfbp", fusion_threshold_bytes=None)
        return msgspec.structs.replace(point, setting=msgspec.structs.replace(point.setting, plan=plan))

    first = msgspec.structs.replace(predictions, points=(mg_wfbp(predictions.points[0]),))
    sha256 = codec.digest(first)
    measured = msgspec.structs.replace(results, points=(mg_wfbp(results.points[0]),), predictions_sha256=sha256)
    comparison = compared((first, measured), (first, measured))
    assert {point["setting"]["fusion_threshold_bytes"] for point in comparison.points} == {None}
