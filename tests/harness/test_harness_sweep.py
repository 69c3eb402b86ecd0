"""A small sweep from beginning to end: its files, its honesty, and what happens to a folder that is not empty."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from interrupted import killed_once_it_exists

from dpsim import codec
from dpsim.cli import app
from dpsim.errors import ConfigError
from dpsim.harness.sweep.check import check
from dpsim.harness.sweep.experiment import predict_from
from dpsim.harness.sweep.questions import completed
from dpsim.harness.sweep.sweep import sweep
from dpsim.lowering.fusion import fuse
from dpsim.model import past
from dpsim.model.residuals import Residual, all_widths
from dpsim.model.version import MODEL_VERSION
from dpsim.records.comparison import Comparison
from dpsim.records.sweep import Experiment, read_predictions, read_results
from dpsim.study.inputs import SCHEMA as INPUTS_SCHEMA
from dpsim.study.inputs import Inputs
from dpsim.study.task import SAMPLES_SCHEMA, Samples

ROOT = Path(__file__).parents[2]
NETWORKS = ("node", "paced:50us,1gbit")
TINY = Experiment(
    name="tiny",
    question="fusion-threshold",
    base={"model": "mlp:16x3", "global_batch": 64, "overlap": "off"},
    axes={"network": NETWORKS, "devices": (1, 2), "fusion_threshold_bytes": (0.0, math.inf)},
    seed=11,
    budget_s=1.5,
    interval=1e-6,
)
"""No median gets as certain as ``interval`` asks, so the measuring takes the whole budget."""


def changed(**values: Any) -> Experiment:
    """The tiny sweep with other values of its settings."""
    return TINY.changed(**values)


class Done(NamedTuple):
    folder: Path
    comparison: Comparison
    messages: list[str]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The tiny sweep, run once for all tests of this module."""
    folder, messages = tmp_path_factory.mktemp("sweeps") / "tiny", []
    return Done(folder, sweep(TINY, folder, messages.append).comparison, messages)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_all_files_are_there_and_no_samples_are_left_over(done: Done) -> None:
    names = {path.name for path in done.folder.iterdir()}
    records = {"predictions.json", "inputs.json", "blind.json", "results.json"}
    assert records | {"index.html", "report.md", "step_time.svg"} <= names
    assert "samples.json" not in names and not any("partial" in name or "tmp" in name for name in names)


def test_both_predictions_follow_from_what_was_profiled_and_calibrated_alone(done: Done) -> None:
    inputs = codec.read(done.folder / "inputs.json", Inputs, "inputs", INPUTS_SCHEMA)
    assert inputs.beforehand_until <= read_results(done.folder / "results.json").measured_from
    assert any(len(series.value) > series.beforehand > 0 for series in inputs.rows)
    checked = check(done.folder)
    assert (checked.verdict, checked.model_version) == ("verified", MODEL_VERSION)
    assert [each.file for each in checked.records] == ["inputs.json", "predictions.json", "blind.json"]
    assert all(each.stated == each.computed for each in checked.records)


def test_other_measured_samples_change_no_prediction(done: Done, tmp_path: Path) -> None:
    folder = shutil.copytree(done.folder, tmp_path / "copy")
    results = read_results(folder / "results.json")
    slower = [msgspec.structs.replace(p, step_s=tuple(3 * s for s in p.step_s)) for p in results.points]
    codec.write(folder / "results.json", msgspec.structs.replace(results, points=tuple(slower)))
    assert check(folder).verdict == "verified"


def test_a_profiled_time_that_was_edited_is_found(
    done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(done.folder, tmp_path / "copy")
    inputs = codec.read(folder / "inputs.json", Inputs, "inputs", INPUTS_SCHEMA)
    longer = [msgspec.structs.replace(each, value=tuple(2 * s for s in each.value)) for each in inputs.rows]
    codec.write(folder / "inputs.json", msgspec.structs.replace(inputs, rows=tuple(longer)))
    with pytest.raises(SystemExit, match="1"):
        app.run(["report", str(folder), "--check"])
    shown = capsys.readouterr().out
    assert shown.startswith("damaged: inputs.json has another SHA-256 than results.json states") and "today" in shown
    codec.write(folder / "inputs.json", msgspec.structs.replace(inputs, bare=()))
    with pytest.raises(SystemExit, match="1"):
        app.run(["report", str(folder), "--check"])
    assert "does not hold what the experiment" in capsys.readouterr().out


def test_predictions_that_were_edited_with_their_hashes_are_found(done: Done, tmp_path: Path) -> None:
    """Who alters a prediction can state its new hash, but not make the inputs give it."""
    folder = shutil.copytree(done.folder, tmp_path / "copy")
    predictions, results = read_predictions(folder / "predictions.json"), read_results(folder / "results.json")
    better = [msgspec.structs.replace(point, step_s=point.step_s * 1.0001) for point in predictions.points]
    predictions = msgspec.structs.replace(predictions, points=tuple(better))
    codec.write_record(folder / "predictions.json", predictions)
    assert "not measured against these predictions" in check(folder).damage
    restated = msgspec.structs.replace(results, predictions_sha256=codec.digest(predictions))
    codec.write_record(folder / "results.json", restated)
    assert check(folder).damage == "predictions.json holds other predictions than the same model makes of inputs.json"


def test_without_inputs_there_is_nothing_to_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["report", str(tmp_path), "--check", "--json"]) == 2
    assert "it has no inputs.json" in capsys.readouterr().err


def test_the_prediction_came_first_and_is_the_one_that_was_hashed(done: Done) -> None:
    predictions, results = (
        read_predictions(done.folder / "predictions.json"),
        read_results(done.folder / "results.json"),
    )
    assert predictions.predicted_at == results.predicted_at < results.measured_from < results.measured_until
    assert codec.digest(predictions) == results.predictions_sha256
    assert predictions.experiment == results.experiment == completed(TINY)


def test_the_study_is_kept_for_the_intervals_of_the_next_ones(done: Done) -> None:
    results = read_results(done.folder / "results.json")
    kept = past.load(results.environment.processor, results.environment.cores)
    groups = {
        f"{network}, {count}" for network in ("node", "emulated link") for count in ("1 device", "several devices")
    }
    of_study = [residual for residual in kept if residual.study == results.predictions_sha256]
    assert {(residual.kind, residual.group) for residual in of_study} == {*product(("beforehand", "blind"), groups)}
    blind = read_predictions(done.folder / "blind.json")
    assert {point.interval_studies for point in blind.points} == {0}
    assert {width.studies for machine in blind.machines for width in machine.interval_widths} == {0}


def test_past_studies_make_the_blind_intervals_wider_and_let_them_state_their_level(done: Done) -> None:
    predictions = read_predictions(done.folder / "predictions.json")
    inputs = codec.read(done.folder / "inputs.json", Inputs, "inputs", INPUTS_SCHEMA)
    studies = [
        Residual(study=str(number), kind=kind, group="node, several devices", ratios=(factor,))
        for number in range(9)
        for kind, factor in (("blind", 4.0), ("beforehand", 8.0))
    ]
    plain = predict_from(predictions, inputs, same_minutes=True).points
    wider = msgspec.structs.replace(inputs, widths=all_widths(studies))
    learnt = predict_from(predictions, wider, same_minutes=True).points
    for before, after in zip(plain, learnt, strict=True):
        assert before.step_s == after.step_s
        if after.setting.network == "node" and after.setting.plan.devices > 1:
            assert (after.interval_factor, after.interval_studies, after.interval_level) == (4.0, 9, 0.9)
            assert after.high_s / after.step_s == pytest.approx((before.high_s / before.step_s) ** 4, rel=1e-9)
        else:
            assert after.high_s == before.high_s and after.interval_level is None


def test_every_predicted_point_was_measured(done: Done) -> None:
    predictions, results = (
        read_predictions(done.folder / "predictions.json"),
        read_results(done.folder / "results.json"),
    )
    assert [point.setting for point in predictions.points] == [point.setting for point in results.points]
    expected = {(network, 1, math.inf, repeat) for network in NETWORKS for repeat in (0, 1)}
    expected |= {(n, 2, t, repeat) for n in NETWORKS for t in (0.0, math.inf) for repeat in (0, 1)}
    keys = [point.setting for point in results.points]
    assert {(k.network, k.plan.devices, k.plan.fusion_threshold_bytes, k.repeat) for k in keys} == expected
    tensors = 2 * 4
    for point in results.points:
        most = tensors if point.setting.plan.fusion_threshold_bytes == 0 else 1
        assert point.buckets == (0 if point.setting.plan.devices == 1 else most)
        assert len(point.step_s) >= 30 and all(0 < s < 10 for s in point.step_s)
        assert len(point.step_s) == len(point.exposed_communication_s) == len(point.round) == len(point.losses)
        assert all(0 <= e <= s for e, s in zip(point.exposed_communication_s, point.step_s, strict=True))
        assert (max(point.exposed_communication_s) == 0) == (point.setting.plan.devices == 1)
        assert point.timeline is not None and point.timeline.source == "measured"
        assert point.timeline.emulated_network == (point.setting.network != "node")
    assert results.recording_s_per_event > 0


def test_the_comparison_has_every_threshold_of_every_network(done: Done) -> None:
    points = [point for point in done.comparison.points if point.scored]
    assert {group.network for group in done.comparison.groups} == set(NETWORKS)
    actual = {(point.network, point.devices, point.fusion_threshold_bytes) for point in points}
    assert actual >= {(network, 2, threshold) for network in NETWORKS for threshold in (0.0, math.inf)}


def test_an_emulated_message_costs_what_the_link_says(done: Done) -> None:
    """With a bucket a tensor, a ring on two devices waits for two latencies a bucket at least."""
    results = read_results(done.folder / "results.json")
    for point in results.points:
        if point.setting.network != "node" and point.setting.plan.devices == 2:
            assert min(point.exposed_communication_s) > 0.9 * point.buckets * 2 * 50e-6


def test_the_same_experiment_again_measures_nothing(done: Done) -> None:
    before = {name: (done.folder / name).read_bytes() for name in ("predictions.json", "results.json")}
    messages: list[str] = []
    again = sweep(TINY, done.folder, messages.append).comparison
    assert "nothing is measured again" in messages[0]
    assert before == {name: (done.folder / name).read_bytes() for name in before}
    assert again == done.comparison


def test_another_experiment_into_the_same_folder_is_refused_and_changes_nothing(done: Done) -> None:
    before = contents(done.folder)
    with pytest.raises(ConfigError, match=r"another experiment: .*global_batch is 64 there, 32 here"):
        sweep(changed(global_batch=32), done.folder, lambda _: None)
    assert contents(done.folder) == before


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(ConfigError, match=r"not empty \(thesis.tex\)"):
        sweep(TINY, tmp_path, lambda _: None)
    assert contents(tmp_path).keys() == {"thesis.tex"}


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_with_the_samples_it_has(done: Done, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    folder.mkdir()
    shutil.copy(done.folder / "predictions.json", folder)
    samples = folder / "samples.json"
    program = (
        "import json, sys; from pathlib import Path; from dpsim.harness.sweep.sweep import sweep;"
        "from dpsim.records.sweep import Experiment; from dpsim import codec;"
        "sweep(codec.decode(json.loads(sys.argv[2]), Experiment, 'experiment'), Path(sys.argv[1]), print)"
    )
    killed_once_it_exists(samples, ["-c", program, folder, json.dumps(codec.to_builtins(TINY))])
    assert not (folder / "results.json").exists()
    before = codec.read(samples, Samples, "samples", SAMPLES_SCHEMA)
    assert before.spent_s > 0

    messages: list[str] = []
    sweep(TINY, folder, messages.append)
    assert any("continuing an interrupted sweep" in line for line in messages)
    results = read_results(folder / "results.json")
    assert not samples.exists()
    for old, new in zip(before.points, results.points, strict=True):
        assert old.setting == new.setting
        kept = len(old.step_s)
        assert 0 < kept < len(new.step_s)
        for name in ("step_s", "exposed_communication_s", "round", "losses"):
            assert getattr(new, name)[:kept] == getattr(old, name)
        assert min(new.round[kept:]) > max(old.round)


def test_thresholds_that_are_left_out_all_give_different_buckets() -> None:
    experiment = completed(changed(model="mlp:64x20", fusion_threshold_bytes=None))
    thresholds = experiment.values("fusion_threshold_bytes")
    assert thresholds[0] == 0 and thresholds[-1] == math.inf and 3 <= len(thresholds) <= 9
    from dpsim.data import load_dataset
    from dpsim.nn import build_model
    from dpsim.runtime.describe import describe

    data = load_dataset("digits")
    order = describe(build_model("mlp:64x20", data.input_shape, data.classes), "model").ready_order
    buckets = [len(fuse(order.size_bytes, "tarantella", t, dtype_code=order.dtype_code)) - 1 for t in thresholds]
    assert len(set(buckets)) == len(buckets) and buckets[0] == len(order.size_bytes) and buckets[-1] == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": (2, 2)}, "devices is"),
        ({"network": ()}, "network is"),
        ({"algorithm": ("ring", "direct", "two-shot")}, "3 algorithms for 2 networks"),
        ({"algorithm": ("mpi",)}, "hides its messages"),
        ({"fusion_rule": "one"}, "no threshold to sweep"),
        ({"global_batch": 1}, "cannot feed 2 devices"),
        ({"network": ("ether",)}, "not understood"),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep(changed(**given), tmp_path / "new", lambda _: None)
    assert message in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_global_batch_above_the_data_set_is_refused(tmp_path: Path) -> None:
    """No step would ever have the whole batch, so nothing would be counted."""
    with pytest.raises(ConfigError, match="5000"):
        sweep(changed(global_batch=5000), tmp_path / "new", lambda _: None)
