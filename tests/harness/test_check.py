"""Every committed sweep is undamaged, and what was altered in one is found: ``dpsim report FOLDER --check``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpsim import codec
from dpsim.cli import app
from dpsim.harness.sweep.check import check
from dpsim.harness.sweep.packed import PACKED
from dpsim.model.version import MODEL_VERSION
from dpsim.records.sweep import Predictions, read_predictions, read_results
from dpsim.study.inputs import SCHEMA, Inputs

REPORTS = Path(__file__).parents[2] / "reports"
SWEPT = sorted(path.parent.name for name in ("blind.json", PACKED) for path in REPORTS.glob(f"*/{name}"))
SMALL = REPORTS / "devices"


def test_all_sweep_reports_are_known() -> None:
    assert {
        "example",
        "devices",
        "batch-norm",
        "joint",
        "local-batch",
        "strategies",
        "ddp",
        "shaped-8",
    } <= {*SWEPT}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SWEPT)
def test_no_committed_sweep_is_damaged(name: str) -> None:
    """One of another model may differ from today's, or has the same numbers; one of this model has to be verified."""
    checked = check(REPORTS / name)
    assert checked.damage == ""
    same = all(record.agrees is not False for record in checked.records)
    assert checked.verdict == ("verified" if same else "of another model")
    assert same or checked.model_version != MODEL_VERSION
    assert all(record.points for record in checked.records[1:])


def of_version(folder: Path, version: int) -> None:
    """Let the records of a folder be those of another version of the model, with the hashes that it would state."""
    inputs = codec.read_raw(folder / "inputs.json", "inputs") | {"model_version": version}
    (folder / "inputs.json").write_text(json.dumps(inputs))
    hashes: dict[str, Any] = {"model_version": version}
    for name, field in (("predictions", "predictions_sha256"), ("blind", "blind_sha256")):
        path = folder / f"{name}.json"
        predictions = msgspec.structs.replace(read_predictions(path), model_version=version)
        codec.write_record(path, predictions)
        hashes[field] = codec.digest(predictions)
    hashes["inputs_sha256"] = codec.digest(codec.read(folder / "inputs.json", Inputs, "inputs", SCHEMA))
    results = read_results(folder / "results.json")
    codec.write_record(folder / "results.json", msgspec.structs.replace(results, **hashes))


def faster(predictions: Predictions) -> Predictions:
    points = [msgspec.structs.replace(point, step_s=point.step_s * 0.98) for point in predictions.points]
    return msgspec.structs.replace(predictions, points=tuple(points))


def test_predictions_of_another_version_stand_beside_todays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(SMALL, tmp_path / "copy")
    for name in ("predictions", "blind"):
        path = folder / f"{name}.json"
        codec.write_record(path, faster(read_predictions(path)))
    of_version(folder, 7)
    with pytest.raises(SystemExit, match="3"):
        app.run(["report", str(folder), "--check"])
    shown = capsys.readouterr().out
    assert "of model 7, and not damaged" in shown and f"This dpsim has model {MODEL_VERSION}" in shown
    assert "steps differ by up to +2.0%" in shown and "step as" in shown
    with pytest.raises(SystemExit, match="3"):
        app.run(["report", str(folder), "--check", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert (printed["summary"]["verdict"], printed["summary"]["model_version"]) == ("of another model", 7)
    assert {row["predictions"] for row in printed["points"]} == {"predictions.json", "blind.json"}
    assert all(row["difference"] == pytest.approx(1 / 0.98 - 1) for row in printed["points"])


def test_todays_version_with_other_numbers_is_damage(tmp_path: Path) -> None:
    folder = shutil.copytree(SMALL, tmp_path / "copy")
    of_version(folder, MODEL_VERSION)
    assert check(folder).verdict == "verified"
    codec.write_record(folder / "blind.json", faster(read_predictions(folder / "blind.json")))
    assert check(folder).damage == "blind.json has another SHA-256 than results.json states"


def cut_off(folder: Path) -> None:
    path = folder / "inputs.json"
    path.write_text(path.read_text()[:-100])


def of_another_sweep(folder: Path) -> None:
    shutil.copy(REPORTS / "joint" / "blind.json", folder / "blind.json")


def without_times(folder: Path) -> None:
    inputs = codec.read_raw(folder / "inputs.json", "inputs")
    for series in inputs["rows"]:
        if series["quantity"] == "forward_s":
            series.update(visit=[], value=[], beforehand=0)
    (folder / "inputs.json").write_text(json.dumps(inputs))


def of_two_models(folder: Path) -> None:
    path = folder / "blind.json"
    codec.write_record(path, msgspec.structs.replace(read_predictions(path), model_version=0))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("alter", "word"),
    [
        (cut_off, "not valid JSON"),
        (of_another_sweep, "other settings"),
        (without_times, "does not hold what the experiment"),
        (of_two_models, "of models"),
    ],
)
def test_damage_of_older_records_is_found(
    alter: Callable[[Path], None], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(SMALL, tmp_path / "copy")
    alter(folder)
    with pytest.raises(SystemExit, match="1"):
        app.run(["report", str(folder), "--check"])
    assert capsys.readouterr().out.startswith("damaged: ")
    assert word in check(folder).damage


def test_a_format_of_another_version_is_no_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(SMALL, tmp_path / "copy")
    text = (folder / "results.json").read_text().replace("dpsim.results/3", "dpsim.results/9")
    (folder / "results.json").write_text(text)
    assert app.run(["report", str(folder), "--check"]) == 2
    assert "version 9" in capsys.readouterr().err
