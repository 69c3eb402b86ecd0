"""``dpsim sweep FILE``: any grid of settings predicted, measured and reported as one run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dpsim.harness.sweep.compare import compare
from dpsim.records.sweep import read_predictions, read_results
from dpsim.report.sweep.content import answers, tables

pytestmark = pytest.mark.slow
Dpsim = Callable[..., tuple[int, str, str]]
FILE = """
schema = "dpsim.experiment/2"
name = "mixed"
budget_s = 0

[base]
network = "paced:50us,1gbit"
fusion_rule = "per-tensor"

[axes]
model = ["mlp:8x2", "mlp:16"]
devices = [1, 2]
algorithm = ["ring", "direct"]
global_batch = [16, 32]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep, run once for all tests of this module, calibrating as briefly as it can."""
    from dpsim.cli import app

    place = tmp_path_factory.mktemp("grids")
    (place / "mixed.toml").write_text(FILE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpsim.study.inputs._LEAST_S", 0.1)
        assert app.run(["sweep", str(place / "mixed.toml"), "--output", str(place / "out")]) == 0
    return place / "out"


def test_every_setting_is_predicted_from_its_own_model_and_measured(folder: Path) -> None:
    predictions, results = read_predictions(folder / "predictions.json"), read_results(folder / "results.json")
    assert {point.setting for point in predictions.points} == {point.setting for point in results.points}
    assert len(predictions.workloads) == len(predictions.machines) == 2
    for point in predictions.points:
        workload = predictions.workloads[point.workload]
        assert workload.name.startswith(point.setting.model)
        assert {*workload.local_batches} == {8, 16, 32}
    several = [point.setting for point in results.points if point.setting.plan.devices == 2]
    assert len([setting for setting in several if not setting.repeat]) == 8 and len(several) == 12
    alone = [point.setting for point in results.points if point.setting.plan.devices == 1]
    first = [setting for setting in alone if not setting.repeat]
    assert len(first) == 4  # the algorithm does not matter on one device: a model at a batch is measured once
    assert len(alone) == 8  # each is the first or the last of its model, which run twice


def test_settings_are_compared_within_a_model_and_a_device_count(folder: Path) -> None:
    comparison = compare(read_predictions(folder / "predictions.json"), read_results(folder / "results.json"))
    assert comparison.compared == ("algorithm",)
    names = {f"paced:50us,1gbit; {m}; 2 devices; global batch {b}" for m in ("mlp:8x2", "mlp:16") for b in (16, 32)}
    assert {group.name for group in comparison.groups} == names
    for group in comparison.groups:
        assert {point.algorithm for point in comparison.members(group)} == {"ring", "direct"}
    assert all(point.measured_speedup for point in comparison.points)
    assert len(answers(comparison)) == 4
    heads = [column.head for column in tables(comparison)[0].columns]
    assert "algorithm" in heads and "samples/s" in heads


def test_the_report_shows_every_setting(folder: Path, dpsim: Dpsim) -> None:
    assert {"index.html", "report.md", "settings.svg", "where_time_goes.svg"} <= {p.name for p in folder.iterdir()}
    code, out, _ = dpsim("report", folder, "--json")
    shown = json.loads(out)
    assert code == 0 and len(shown["points"]) == 12
    assert {point["model"] for point in shown["points"]} == {"mlp:8x2", "mlp:16"}
    assert all("setting" not in point and point["fusion_threshold_bytes"] is None for point in shown["points"])


def test_a_file_of_another_kind_and_a_misspelt_command_are_refused(dpsim: Dpsim, tmp_path: Path) -> None:
    code, _, err = dpsim("sweep", "devises")
    assert code == 2 and "did you mean 'devices'?" in err
    (tmp_path / "old.toml").write_text('schema = "dpsim.experiment/1"\n', encoding="utf-8")
    code, _, err = dpsim("sweep", tmp_path / "old.toml")
    assert code == 2 and "dpsim.experiment/2" in err
    assert dpsim("sweep")[0] == 0
