"""``dpsim sweep local-batch`` and ``batch-norm``: what is compared, what is refused, and a small run of each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpsim.errors import ConfigError
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.norms import norm_cases
from dpsim.harness.sweep.questions import compared, completed, group_name
from dpsim.harness.sweep.questions.local_batch import busy_from, hidden_from
from dpsim.nn.tokens import norm_of
from dpsim.records.comparison import Comparison
from dpsim.records.sweep import Experiment, read_predictions, read_results
from dpsim.report.sweep.content import answers
from dpsim.setting import Setting, setting_of

Dpsim = Callable[..., tuple[int, str, str]]
LINK = "paced:50us,1gbit"


def experiment(question: str, **fields: Any) -> Experiment:
    base = {"model": "cnn:2,2", "overlap": "off"} | fields.pop("base", {})
    return Experiment(question=question, base=base, **fields)


def test_a_sweep_over_the_local_batch_compares_batches_on_each_number_of_devices() -> None:
    weak = completed(experiment("local-batch", axes={"local_batch": (4, 8, 16), "devices": (1, 2)}))
    assert compared(weak) == ("local_batch",) and completed(weak) == weak
    assert {group_name(weak, setting_of(row)) for row in weak.rows} == {"node; 1 device", "node; 2 devices"}
    strong = completed(experiment("local-batch", axes={"global_batch": (4, 8, 16)}))
    assert compared(strong) == ("global_batch",)
    assert {setting_of(row).plan.local_batch for row in strong.rows} == {2, 4, 8, 16}


def test_a_sweep_over_batch_norm_compares_norms_at_each_batch() -> None:
    grid = completed(experiment("batch-norm", axes={"local_batch": (4, 8), "devices": (1, 4), "network": (LINK,)}))
    assert completed(grid) == grid
    settings = [setting_of(row) for row in grid.rows]
    norms = {norm_of(setting.model, setting.plan.batch_norm) for setting in settings}
    assert norms == {"local", "leaf", "global", "none", "group"} and len(settings) == 5 * 2 * 2
    assert {setting.plan.leaves for setting in settings if setting.plan.batch_norm == "leaf"} == {4}
    assert {group_name(grid, setting) for setting in settings} == {
        f"{LINK}; {devices}; local batch {batch}" for devices in ("1 device", "4 devices") for batch in (4, 8)
    }


@pytest.mark.parametrize(
    ("question", "fields", "message"),
    [
        ("local-batch", {"axes": {"local_batch": (4, 8)}}, "with 2 values of local_batch: 4, 8"),
        ("local-batch", {"axes": {"local_batch": (4, 8, 16), "leaves": (4,)}}, "with 4 leaves"),
        ("local-batch", {"axes": {"local_batch": (1, 8, 900)}}, "a global batch of 1800 samples"),
        ("local-batch", {"axes": {"local_batch": (4, 8, 16), "algorithm": ("ring", "mpi", "direct")}}, "3 algorithms"),
        ("batch-norm", {"base": {"model": "mlp:8"}, "axes": {"local_batch": (4,)}}, "has no batch norm"),
        (
            "batch-norm",
            {"base": {"overlap": "all"}, "axes": {"local_batch": (4,)}},
            "overlap all in a sweep over batch",
        ),
        ("batch-norm", {}, "a setting without a batch"),
        (
            "batch-norm",
            {"axes": {"local_batch": (4,), "fusion_threshold_bytes": (0.0, 1024.0)}},
            "a sweep over batch norm at 2 fusion thresholds",
        ),
    ],
)
def test_a_grid_that_cannot_answer_is_refused(question: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        completed(experiment(question, **fields))


@pytest.mark.parametrize(
    ("model", "norms", "message"),
    [
        ("cnn", ("local", "bach"), "unknown norm 'bach'"),
        ("cnn", ("local", "local"), "given twice"),
        ("cnn", ("global",), "1 norm"),
        ("own.py:build", ("local", "group"), "which is not built in"),
    ],
)
def test_norms_that_cannot_be_compared_are_refused(model: str, norms: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        norm_cases(experiment("batch-norm", base={"model": model}), norms)


def test_flags_of_both_scalings_are_refused(dpsim: Dpsim) -> None:
    code, _, err = dpsim("sweep", "local-batch", "--local-batch", "4,8,16", "--global-batch", "8,16")
    assert code == 2 and "--local-batch and --global-batch" in err
    code, _, err = dpsim("sweep", "batch-norm", "--local-batch", "4", "--global-batch", "8")
    assert code == 2 and "--local-batch and --global-batch" in err
    code, _, err = dpsim("sweep", "local-batch", "--local-batch", "4,8,eight")
    assert code == 2 and "'eight'" in err


def measured_as(folder: Path, step_s: Callable[[Setting], float]) -> Comparison:
    """The sweep of a folder with made times: every sample of a setting took as long, without exposed communication."""
    results = read_results(folder / "results.json")
    points = [
        msgspec.structs.replace(
            point,
            step_s=(step_s(point.setting),) * len(point.step_s),
            exposed_communication_s=(0.0,) * len(point.step_s),
            clean=(),
            disturbance_rule="",
        )
        for point in results.points
    ]
    return compare(read_predictions(folder / "predictions.json"), msgspec.structs.replace(results, points=points))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sweep over the local batch, calibrating as briefly as it can."""
    from dpsim.cli import app

    folder = tmp_path_factory.mktemp("local") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpsim.study.inputs._LEAST_S", 0.1)
        patch.setattr("dpsim.report.sweep.verdict.MOST_NOISE", math.inf)  # so short a run knows little
        flags = [
            "--model",
            "cnn:2,2",
            "--network",
            LINK,
            "--local-batch",
            "2,4,8,16",
            "--budget",
            "0",
            "--set",
            "overlap=off",
        ]
        assert app.run(["sweep", "local-batch", *flags, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def curve(swept: Path) -> Comparison:
    return compare(read_predictions(swept / "predictions.json"), read_results(swept / "results.json"))


@pytest.mark.slow
def test_batches_between_the_profiled_ones_are_predicted_and_one_device_is_scored(
    swept: Path, curve: Comparison
) -> None:
    (workload,) = read_predictions(swept / "predictions.json").workloads
    assert workload.local_batches == (2, 8, 16)
    assert [group.name for group in curve.groups] == [f"{LINK}; 1 device", f"{LINK}; 2 devices"]
    alone, together = curve.groups
    assert set(alone.step.null_errors) == {"proportional_to_batch"}
    assert set(together.step.null_errors) == {"perfect_scaling", "proportional_to_batch", "free_communication"}
    assert alone.shape is not None and "constant" in alone.shape.null_errors
    assert [network.points for network in curve.networks] == [4]
    assert all(point.measured_speedup is not None for point in curve.points)


@pytest.mark.slow
def test_a_device_with_a_larger_batch_allocates_more_and_never_less_than_predicted(curve: Comparison) -> None:
    for group in curve.groups:
        members = curve.members(group)
        assert (members[0].memory_bytes or 0) < (members[-1].memory_bytes or 0)
        assert all(p.predicted_memory_bytes and p.predicted_memory_bytes <= (p.memory_bytes or 0) for p in members)


@pytest.mark.slow
def test_a_device_is_busy_where_the_curve_stays_near_its_best_and_hides_where_little_is_exposed(
    curve: Comparison,
) -> None:
    points = curve.members(curve.groups[1])
    steps, exposed = (1.0, 1.5, 2.0, 3.8), (0.5, 0.3, 0.1, 0.1)
    members = [
        point.replaced(
            measured_step_s=step,
            predicted_step_s=point.global_batch / 10,
            exposed_communication_s=waiting,
            predicted_exposed_communication_s=step,
        )
        for point, step, waiting in zip(points, steps, exposed, strict=True)
    ]
    assert [point.local_batch for point in members] == [2, 4, 8, 16]
    assert (busy_from(members).measured, busy_from(members).predicted) == (8, 2)
    assert (hidden_from(members).measured, hidden_from(members).predicted) == (8, None)


@pytest.mark.slow
def test_the_report_shows_the_curve(swept: Path, dpsim: Dpsim) -> None:
    assert {"index.html", "report.md", "local_batch.svg", "where_time_goes.svg"} <= {p.name for p in swept.iterdir()}
    text = (swept / "report.md").read_text(encoding="utf-8")
    assert "| proportional to the batch |" in text
    code, out, _ = dpsim("report", swept, "--json")
    points = json.loads(out)["points"]
    assert code == 0 and {point["local_batch"] for point in points} == {2.0, 4.0, 8.0, 16.0}


@pytest.mark.slow
def test_the_answer_says_from_which_batch_devices_are_busy_and_communication_hides(swept: Path) -> None:
    steps = {2: 1.0, 4: 1.5, 8: 2.0, 16: 3.8}
    for answer in answers(measured_as(swept, lambda setting: steps[setting.plan.local_batch])):
        assert "The devices reach 90% of the most samples/s from local batch 8 on (predicted: " in answer
        assert ("Communication hides at all of these batches" in answer) == ("2 devices" in answer)


@pytest.mark.slow
def test_a_sweep_over_batch_norm_reports_what_global_statistics_add(dpsim: Dpsim, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpsim.study.inputs._LEAST_S", 0.1)
        patch.setattr("dpsim.report.sweep.verdict.MOST_NOISE", math.inf)  # so short a run knows little
        code, _, err = dpsim(
            *("sweep", "batch-norm", "--model", "cnn:2,2", "--network", LINK, "--local-batch", "4", "--budget", "0"),
            *("--batch-norm", "local,leaf,global,instance", "--seeds", "0", "--output", tmp_path / "out"),
        )
    assert code == 0, err
    comparison = measured_as(tmp_path / "out", lambda setting: 1.5 if setting.plan.batch_norm == "global" else 1.0)
    (text,) = answers(comparison)
    assert "Statistics of the whole batch change a step by +50.0% against those of each device (predicted " in text
    (group,) = comparison.groups
    members = comparison.members(group)
    assert [norm_of(p.model, p.batch_norm) for p in members] == ["global", "leaf", "local", "instance"]
    exposed = {norm_of(p.model, p.batch_norm): p.predicted_exposed_communication_s for p in members}
    assert exposed["global"] > 5 * 50e-6  # two batch norms, each with two blocking sums of 50 us or more, and a bucket
    assert (tmp_path / "out" / "norms.svg").exists()
