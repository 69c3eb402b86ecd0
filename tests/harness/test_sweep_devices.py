"""``dpsim sweep devices``: speedup and drift, measured beside predicted; going on, refusing, and weak scaling."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim import codec
from dpsim.cli import app
from dpsim.data.sharding import largest_share
from dpsim.errors import ConfigError, FileFormatError
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.drift import DRIFT, DRIFT_PREDICTIONS, drift, read_drift
from dpsim.harness.sweep.experiment import predict_experiment
from dpsim.harness.sweep.questions import completed
from dpsim.harness.sweep.questions.devices import QUESTION, drift_sentence
from dpsim.harness.sweep.sweep import Study, declared, sweep
from dpsim.model.prices import local_share
from dpsim.plan import Plan
from dpsim.records.reproduce import DriftPredictions, ReproduceRecord
from dpsim.records.sweep import (
    Experiment,
    MeasuredPoint,
    Predictions,
    Results,
    read_predictions,
    read_results,
)
from dpsim.report.sweep.content import answers
from dpsim.report.sweep.warnings import warnings
from dpsim.runtime.micro_batches import own_leaves
from dpsim.study.inputs import Prepared
from dpsim.study.profile import ProfileConfig
from dpsim.units import format_duration

pytestmark = pytest.mark.slow

Dpsim = Callable[..., tuple[int, str, str]]
FLAGS = (
    "--model",
    "cnn:4,8",
    "--dataset",
    "synthetic:6x6x1,classes=3,train=72,test=3",
    "--devices",
    "2,3",
    "--global-batch",
    "36",
    "--steps",
    "5",
    "--set",
    "overlap=off",
    "--budget",
    "0s",
)


class Done(NamedTuple):
    folder: Path
    shown: dict[str, Any]
    predictions: Predictions
    results: Results


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    """The command run once for all tests of this module, calibrating as briefly as it can."""
    folder, said = tmp_path_factory.mktemp("sweeps") / "devices", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr("dpsim.study.inputs._LEAST_S", 0.1)
        assert app.run(["sweep", "devices", *FLAGS, "--output", str(folder), "--json"]) == 0
    records = read_predictions(folder / "predictions.json"), read_results(folder / "results.json")
    yield Done(folder, json.loads(said.getvalue()), *records)


def test_the_folder_has_the_records_the_page_and_its_figures(done: Done) -> None:
    records = {"predictions.json", "inputs.json", "blind.json", "results.json", DRIFT, DRIFT_PREDICTIONS}
    figures = ("speedup", "drift", "timeline", "where_time_goes")
    expected = {"index.html", "report.md"} | {f"{name}.{kind}" for name in figures for kind in ("svg", "png")}
    assert {path.name for path in done.folder.iterdir()} == records | expected
    page, text = ((done.folder / name).read_text() for name in ("index.html", "report.md"))
    assert "Drift from one device after 5 steps with batch norm local: parameters" in page and "speedup.svg" in text


def test_everything_was_predicted_before_it_was_measured(done: Done) -> None:
    predictions, results, summary = done.predictions, done.results, done.shown["summary"]
    assert codec.digest(predictions) == results.predictions_sha256 == summary["predictions_sha256"]
    assert predictions.predicted_at == results.predicted_at < results.measured_from
    of_drift = codec.read(done.folder / DRIFT_PREDICTIONS, DriftPredictions, "drift", "dpsim.drift/1")
    record = read_drift(predictions, done.folder)
    assert record is not None and record.predictions == of_drift
    assert codec.digest(of_drift) == record.predictions_sha256 == summary["drift_predictions_sha256"]
    assert results.measured_until < record.measured_from < of_drift.predicted_at < record.measured_until


def test_a_point_a_device_count_with_its_speedup(done: Done) -> None:
    points = done.shown["points"]
    assert [point["devices"] for point in points] == [1, 2, 3]
    assert [point["fusion_threshold_bytes"] for point in points] == [None, 32768, 32768]
    assert all(point["global_batch"] == 36 for point in points)
    for point in points:
        assert point["measured_speedup"] == pytest.approx(points[0]["measured_step_s"] / point["measured_step_s"])
        assert point["predicted_speedup"] == pytest.approx(points[0]["predicted_step_s"] / point["predicted_step_s"])
        assert point["efficiency"] == pytest.approx(point["measured_speedup"] / point["devices"])
    assert [point["repeat"] for point in points] == [2, 2, 2]
    for mark, time in (("is_best_measured", "measured_step_s"), ("is_best_predicted", "predicted_step_s")):
        assert [point[mark] for point in points] == [p[time] == min(q[time] for q in points) for p in points]


def test_scores_are_of_more_than_one_device_against_nulls_that_are_not_the_model(done: Done) -> None:
    (group,) = done.shown["summary"]["groups"]
    assert (group["devices"], group["points"]) == (0, 2)
    assert set(group["step"]["null_errors"]) == {"perfect_scaling", "alpha_beta_no_overlap", "free_communication"}
    one, *several = done.shown["points"]
    for point in several:
        assert point["null_step_s"]["perfect_scaling"] == pytest.approx(one["predicted_step_s"] / point["devices"])
        assert point["null_step_s"]["constant"] == sorted(p["measured_step_s"] for p in done.shown["points"])[1]


def test_drift_of_local_batch_norm_is_as_predicted(done: Done) -> None:
    one, *several = done.shown["points"]
    assert len({point["digest"] for point in done.shown["points"]}) == 3
    assert one["measured_drift"] is one["measured_statistics_drift"] is None
    for point in several:
        assert point["measured_drift"] > 1e-5 and point["predicted_drift"] is None
        assert point["measured_statistics_drift"] == pytest.approx(point["predicted_statistics_drift"], rel=0.5)


def test_the_report_and_a_trace_come_again_from_the_folder(done: Done, dpsim: Dpsim, tmp_path: Path) -> None:
    code, out, _ = dpsim("report", done.folder, "--output", tmp_path, "--json")
    again = json.loads(out)
    assert code == 0 and (again["points"], again["summary"]) == (done.shown["points"], done.shown["summary"])
    assert (tmp_path / "speedup.svg").read_bytes() == (done.folder / "speedup.svg").read_bytes()
    code, out, _ = dpsim("report", done.folder, "--trace", "--output", tmp_path / "trace.json")
    assert code == 0 and "3 devices" in out


def test_a_sweep_says_why_the_drift_of_parameters_is_not_predicted_for_bfloat16(done: Done) -> None:
    comparison = compare(done.predictions, done.results, read_drift(done.predictions, done.folder))
    unpredicted = {"compute_dtype": "bfloat16", "measured_statistics_drift": None, "predicted_statistics_drift": None}
    points = tuple(point.replaced(**unpredicted) for point in comparison.points)
    text = drift_sentence(msgspec.structs.replace(comparison, points=points))
    assert text is not None and "not predicted for bfloat16: " in text
    text = drift_sentence(comparison)
    assert text is not None and "not predicted" not in text


def test_an_interrupted_sweep_measures_the_drift_that_is_missing(
    done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpsim.harness.sweep.sweep.write_report", lambda *_: [])
    for name in ("predictions.json", "results.json"):
        (tmp_path / name).write_bytes((done.folder / name).read_bytes())
    messages: list[str] = []
    comparison = sweep(done.predictions.experiment, tmp_path, messages.append).comparison
    assert [text.split(":")[0] for text in messages] == [
        "the drift",
        "training 1 of 1",
        "training 1 of 2",
        "training 2 of 2",
        "writing the report",
    ]
    predicted_s = 5 * sum(point.step_s for point in done.predictions.points if point.setting.repeat == 0)
    assert f"3 trainings of 5 steps take about {format_duration(predicted_s)} on" in messages[0]
    assert (tmp_path / "results.json").read_bytes() == (done.folder / "results.json").read_bytes()
    assert [point.digest for point in comparison.points] == [point["digest"] for point in done.shown["points"]]


def test_a_sweep_without_its_drift_is_not_complete(done: Done, tmp_path: Path) -> None:
    folder = tmp_path / "devices"
    folder.mkdir()
    for name in ("predictions.json", "results.json"):
        (folder / name).write_bytes((done.folder / name).read_bytes())
    assert Study.of(done.predictions.experiment).free_folder(tmp_path) == folder
    (folder / DRIFT).write_bytes((done.folder / DRIFT).read_bytes())
    assert Study.of(done.predictions.experiment).free_folder(tmp_path) == tmp_path / "devices-2"


def test_another_experiment_and_another_drift_are_refused(done: Done, tmp_path: Path) -> None:
    other = msgspec.structs.replace(done.predictions.experiment, steps=6)
    with pytest.raises(ConfigError, match=r"another experiment: steps is 5 there, 6 here"):
        sweep(other, done.folder, lambda _: None)
    (tmp_path / DRIFT).write_bytes((done.folder / DRIFT).read_bytes())
    with pytest.raises(FileFormatError, match="is not the drift of this sweep"):
        read_drift(msgspec.structs.replace(done.predictions, experiment=other), tmp_path)
    record = codec.read(tmp_path / DRIFT, ReproduceRecord, "drift", "dpsim.reproduce/2")
    codec.write(tmp_path / DRIFT, msgspec.structs.replace(record, predictions_sha256="0" * 64))
    with pytest.raises(FileFormatError, match="or does not belong to its predictions"):
        read_drift(done.predictions, tmp_path)


def resealed(done: Done, experiment: Experiment, **plan: Any) -> tuple[Predictions, Results]:
    """The records as if they were of another experiment, and its points of another ``plan``."""
    predicted, measured = (tuple(map(lambda p: with_plan(p, **plan), each.points)) for each in done[2:])
    predictions = msgspec.structs.replace(done.predictions, experiment=experiment, points=predicted)
    sha = codec.digest(predictions)
    changed = {"experiment": experiment, "predictions_sha256": sha, "points": measured}
    return predictions, msgspec.structs.replace(done.results, **changed)


def with_plan(point: Any, **plan: Any) -> Any:
    setting = msgspec.structs.replace(point.setting, plan=msgspec.structs.replace(point.setting.plan, **plan))
    return msgspec.structs.replace(point, setting=setting)


def test_reproducible_training_drifts_by_nothing(
    done: Done, tmp_path: Path, dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, leaves = done.predictions.experiment, {"batch_norm": "leaf", "leaves": 8}
    reproducible = msgspec.structs.replace(before.changed(**leaves), steps=3)
    records = resealed(done, reproducible, **leaves)
    record = drift(records[0], tmp_path, lambda _: None)
    assert record is not None and record.predictions is None and not (tmp_path / DRIFT_PREDICTIONS).exists()
    actual = compare(*records, record)
    assert actual.identical is True
    assert len({point.digest for point in actual.points}) == 1
    assert [(p.measured_drift, p.predicted_drift) for p in actual.points] == [(None, None), (0.0, 0.0), (0.0, 0.0)]
    sentence = "The training is the same to the bit as on one device after 3 steps with batch norm leaf and 8 leaves"
    assert f"{sentence}, on 2, 3 devices: digest {actual.points[0].digest[:8]}." in answers(actual)

    apart = msgspec.structs.replace(record.runs[-1], ranks_agree=False)
    broken = compare(*records, msgspec.structs.replace(record, runs=(*record.runs[:-1], apart)))
    assert broken.identical is False and broken.points[-1].measured_drift is None
    assert "not-identical" in {warning.kind for warning in warnings(broken)}
    assert any("NOT THE SAME, as promised" in sentence for sentence in answers(broken))
    monkeypatch.setattr("dpsim.harness.sweep.sweep.Study.run", lambda *_: SimpleNamespace(comparison=broken))
    assert dpsim("sweep", "devices", *FLAGS, "--output", tmp_path / "new")[0] == 1


def test_more_devices_than_cores_is_said(done: Done) -> None:
    actual = compare(done.predictions, done.results, read_drift(done.predictions, done.folder))
    for cores, oversubscribed in ((1, "2 and 3 devices"), (2, "3 devices")):
        texts = {w.kind: w.text for w in warnings(msgspec.structs.replace(actual, cores=cores))}
        assert texts["shared-cores"].startswith(f"{oversubscribed} are more than this machine has cores ({cores})")
    assert "shared-cores" not in {w.kind for w in warnings(msgspec.structs.replace(actual, cores=3))}


def test_weak_scaling_grows_the_batch_and_compares_throughput(done: Done) -> None:
    before = done.predictions
    changed = before.experiment.changed(global_batch=None, local_batch=12)
    weak = completed(changed)
    (workload,), (machine,) = before.workloads, before.machines
    prepared = Prepared.for_all((point.setting for point in before.points), workload, machine)
    predictions = predict_experiment(weak, prepared, before.environment)
    assert {(p.setting.plan.devices, p.setting.plan.global_batch) for p in predictions.points} == {
        (1, 12),
        (2, 24),
        (3, 36),
    }
    alone = predictions.points[0].step_s
    assert all(p.null_step_s["perfect_scaling"] == alone for p in predictions.points)
    points = tuple(
        MeasuredPoint(
            setting=p.setting,
            buckets=p.buckets,
            step_s=(0.01 * p.setting.plan.devices**0.5,) * 12,
            exposed_communication_s=(0.0,) * 12,
            round=tuple(range(12)),
            losses=(1.0,) * 12,
        )
        for p in predictions.points
    )
    sha = codec.digest(predictions)
    results = msgspec.structs.replace(
        done.results,
        experiment=weak,
        predictions_sha256=sha,
        points=points,
        predicted_at=predictions.predicted_at,
        measured_from=predictions.predicted_at,
    )
    actual = compare(predictions, results)
    assert [p.measured_speedup for p in actual.points] == pytest.approx([1, 2**0.5, 3**0.5])
    assert [p.is_best_measured for p in actual.points] == [False, False, True]
    assert any("Drift is not measured under weak scaling" in sentence for sentence in answers(actual))
    assert "drift" not in {column.head for column in QUESTION.points(actual).columns}
    assert drift(predictions, Path("nowhere"), lambda _: None) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--devices", "1"), "at least one count above 1"),
        (("--set", "fusion_rule=one"), "has no threshold to sweep"),
        (("--steps", "0"), "steps is 0"),
        (("--set", "leaves=8", "--batch-norm", "local"), "reproducible training with batch_norm local"),
        (("--batch-norm", "leaf"), "batch_norm is leaf, and there are no leaves"),
        (("--set", "leaves=8", "--devices", "9"), "8 leaves cannot feed 9 devices"),
        (("--local-batch", "8", "--set", "leaves=8"), "weak scaling with 8 leaves"),
        (("--local-batch", "8", "--global-batch", "9"), "--local-batch and --global-batch"),
        (("--local-batch", "1000"), "a global batch of 2000 samples"),
        (("--scaling", "weak"), "leave it out: --local-batch is weak scaling"),
        (("--network", "paced:50us,1gbit", "--algorithm", "mpi"), "hides its messages"),
    ],
)
def test_mistakes_are_messagesbefore_anything_runs(
    flags: tuple[str, ...], message: str, dpsim: Dpsim, tmp_path: Path
) -> None:
    code, out, err = dpsim("sweep", "devices", *flags, "--output", tmp_path / "new")
    assert (code, out) == (2, "")
    assert message in err and "allowed:" in err
    assert not (tmp_path / "new").exists()


def test_a_file_is_a_sweep_of_its_own_question(dpsim: Dpsim, tmp_path: Path) -> None:
    path = tmp_path / "declared.json"
    codec.write(path, declared("devices"))
    code, _, err = dpsim("sweep", path, "--steps", "0", "--output", tmp_path / "new")
    assert code == 2 and "steps is 0" in err
    code, _, err = dpsim("sweep", path, "--target-loss", "1", "--fusion-threshold", "0", "--output", tmp_path / "new")
    assert code == 2 and "--target-loss in a sweep with the question devices" in err
    code, _, err = dpsim("sweep", path, "--fusion-threshold", "0,inf", "--output", tmp_path / "new")
    assert code == 2 and "--fusion-threshold 0,inf in a sweep with the question devices" in err
    base = declared("devices")
    thresholds = base.changed(fusion_threshold_bytes=(0.0, 1024.0))
    with pytest.raises(ConfigError, match="at 2 fusion thresholds"):
        completed(thresholds)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 12))
def test_the_largest_share_is_that_of_the_slowest_device(batch: int, devices: int, more: int) -> None:
    batch += devices
    for leaves in (0, devices + more):
        plan = Plan(devices=devices, global_batch=batch, leaves=leaves, batch_norm="leaf" if leaves else "local")
        shares = [own_leaves(plan, rank, batch) for rank in range(devices)]
        assert largest_share(batch, devices, leaves) == local_share(plan) == max(s[-1] - s[0] for s in shares)


def test_a_profile_has_as_many_leaves_of_a_share_as_a_device_computes() -> None:
    for batch, leaves, devices in itertools.product((64, 100), (0, 8, 12), (1, 2, 3, 4, 5, 8)):
        shares = {n: largest_share(batch, n, leaves) for n in (1, devices)}
        plan = Plan(devices=1, global_batch=batch, leaves=leaves, batch_norm=Plan.default_batch_norm(leaves))
        config = ProfileConfig(local_batches=tuple(set(shares.values())), plan=plan)
        assert config.leaves_of(shares[devices]) == -(-leaves // devices)


@pytest.mark.parametrize("seed", ["1", "8"])
def test_the_committed_report_is_made_again_whatever_the_order_of_sets(
    seed: str, python: Callable[..., Any], tmp_path: Path
) -> None:
    report = Path(__file__).parents[2] / "reports" / "devices"
    done = python("-m", "dpsim", "report", str(report), "--output", str(tmp_path), env={"PYTHONHASHSEED": seed})
    assert done.returncode == 0, done.stderr
