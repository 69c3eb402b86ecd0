"""``--json``: exactly one valid JSON object on stdout, under the fixed names; everything else on stderr."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_factory
from published_files import EXPERIMENTS, PREDICT

from dpsim import codec

Dpsim = Callable[..., tuple[int, str, str]]


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _object(dpsim: Dpsim, *arguments: str | Path) -> dict[str, Any]:
    code, out, err = dpsim(*arguments, "--json")
    assert code == 0, err
    shown: dict[str, Any] = json.loads(out, parse_constant=_refuse)
    assert list(shown) == ["schema", "command", "environment", "points", "summary"]
    assert shown["schema"] == "dpsim.output/1"
    assert isinstance(shown["points"], list) and isinstance(shown["summary"], dict)
    assert {"dpsim", "python", "numpy", "blas", "variables"} <= set(shown["environment"])
    return shown


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The records of a sweep."""
    predictions, results = report_factory.sweep()
    codec.write(tmp_path / "predictions.json", predictions)
    codec.write(tmp_path / "results.json", results)
    return tmp_path


def test_predict(dpsim: Dpsim) -> None:
    shown = _object(dpsim, *PREDICT, "--devices", "2,4", "--global-batch", "256", "--fusion-threshold", "0,1MiB,inf")
    assert shown["command"] == "predict"
    assert [p["fusion_threshold_bytes"] for p in shown["points"]] == [0, 2**20, "inf"] * 2
    assert [p["devices"] for p in shown["points"]] == [2, 2, 2, 4, 4, 4]
    expected = {
        "layout",
        "global_batch",
        "local_batch",
        "fusion_rule",
        "buckets",
        "network",
        "predicted_step_s",
        "predicted_low_s",
        "predicted_high_s",
        "predicted_exposed_communication_s",
        "calibrated_on",
        "extrapolated",
        "memory_bytes",
        "fits",
    }
    assert expected <= set(shown["points"][0])


def test_predict_writes_what_it_shows(dpsim: Dpsim, tmp_path: Path) -> None:
    output = tmp_path / "points.json"
    shown = _object(dpsim, *PREDICT, "--devices", "2", "--global-batch", "64", "--output", output)
    assert json.loads(output.read_text())["points"] == shown["points"]


def test_report(dpsim: Dpsim, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    into = tmp_path_factory.mktemp("again")
    shown = _object(dpsim, "report", folder, "--output", into)
    expected = {
        "devices",
        "fusion_threshold_bytes",
        "measured_step_s",
        "measured_low_s",
        "measured_high_s",
        "predicted_step_s",
        "exposed_communication_s",
        "error",
        "noise",
        "emulated_network",
    }
    assert expected <= set(shown["points"][0])
    for network in shown["summary"]["networks"]:
        assert {"network", "median_abs_error", "p90_abs_error", "null_median_abs_error", "skill", "regret"} <= set(
            network
        )
    assert {group["verdict"]["said"] for group in shown["summary"]["groups"]} <= {
        "nothing",
        "unsure",
        "no difference",
        "best",
    }
    assert (into / "index.html").exists()


def test_trace(dpsim: Dpsim, folder: Path) -> None:
    trace = folder / "trace.json"
    shown = _object(dpsim, "report", folder, "--trace", "--output", trace)
    assert shown["summary"] == {"trace": str(trace), "timelines": ["measured", "predicted"]}
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_report_whose_records_are_one_file_is_written_again_with_a_page_and_a_trace(
    dpsim: Dpsim, tmp_path: Path
) -> None:
    swept, trace, page = tmp_path / "shaped-4", tmp_path / "trace.json", tmp_path / "page.html"
    shutil.copytree(EXPERIMENTS.parent / "reports" / "shaped-4", swept)
    (swept / "report.md").unlink()
    assert dpsim("report", swept)[0] == 0 and (swept / "report.md").exists()
    shown = _object(dpsim, "report", swept, "--trace", "--output", trace)
    assert shown["summary"]["timelines"] == ["measured", "predicted"]
    assert dpsim("report", swept, "--page", page)[0] == 0 and "of its report" in page.read_text()


def test_one_device_has_no_threshold_and_the_trace_is_of_the_fastest_setting(dpsim: Dpsim, folder: Path) -> None:
    points = _object(dpsim, "report", folder, "--format", "csv")["points"]
    assert {p["fusion_threshold_bytes"] for p in points if p["devices"] == 1} == {None}
    (traced,) = _object(dpsim, "report", folder, "--trace", "--output", folder / "trace.json")["points"]
    measured = {(p["network"], p["fusion_threshold_bytes"], p["overlap"]): p["measured_step_s"] for p in points}
    fastest = min(p["measured_step_s"] for p in points if p["devices"] == traced["devices"])
    assert measured[traced["network"], traced["fusion_threshold_bytes"], traced["overlap"]] == pytest.approx(
        fastest, rel=0.02
    )


def test_a_trace_of_a_sweep_that_is_not_measured_yet_has_the_prediction(dpsim: Dpsim, folder: Path) -> None:
    (folder / "results.json").unlink()
    shown = _object(dpsim, "report", folder, "--trace", "--output", folder / "trace.json")
    assert shown["summary"]["timelines"] == ["predicted"]


def test_trace_of_a_setting_that_is_not_there_lists_those_that_are(dpsim: Dpsim, folder: Path) -> None:
    code, _, err = dpsim("report", folder, "--trace", "--set", "devices=77", "--output", folder / "trace.json")
    assert code == 2
    assert "devices = 77" in err
    assert "devices 2" in err and "fusion_threshold_bytes inf" in err and "batch_norm" not in err


def test_profile_from_steps(dpsim: Dpsim, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("devices,local_batch,step_s,overlap\n1,64,392ms,off\n2,64,511ms,off\n4,64,555ms,off\n")
    machines = EXPERIMENTS / "machines"
    workload, output = machines / "googlenet_k80.toml", tmp_path / "fitted"
    fit = ("profile", "--workload", workload, "--from-steps", rows)
    shown = _object(dpsim, *fit, "--set", "fusion_rule=one", "--output", output)
    assert {number["name"] for number in shown["summary"]["numbers"]} == {"compute", "bandwidth"}
    assert all(abs(point["error"]) < 0.02 for point in shown["points"]) and len(shown["points"]) == 3
    files = ("--workload", output / "workload.json", "--machine", output / "machine.json")
    predicted = _object(dpsim, "predict", *files, "--devices", "4", "--local-batch", "64", "--set", "overlap=off")
    assert predicted["points"][0]["predicted_low_s"] < predicted["points"][0]["predicted_step_s"]
    of_tables = ("--machine", machines / "k80_10gbe.toml", "--free", "compute,loss")
    told = _object(dpsim, *fit, *of_tables, "--output", output)
    assert [number["name"] for number in told["summary"]["numbers"]] == ["compute", "loss"]
    steps = ("devices=1,local_batch=32,step_s=20ms", "devices=8,local_batch=32,images_per_s=9000")
    row = [word for step in steps for word in ("--from-steps", step)]
    built_in = _object(dpsim, "profile", "--model", "cnn", "--dataset", "digits", *row, "--output", output)
    assert [point["devices"] for point in built_in["points"]] == [1, 8]


def test_doctor(dpsim: Dpsim) -> None:
    shown = _object(dpsim, "doctor")
    actual = {point["name"]: point for point in shown["points"]}
    assert set(actual) == {
        "installation",
        "launcher",
        "MPI",
        "shaped hosts",
        "numba",
        "BLAS",
        "shared memory",
        "cores",
        "clock",
        "kernels",
        "GPU",
    }
    assert actual["MPI"]["state"] == "ok"
    assert "2 ranks computed a sum" in actual["MPI"]["found"]
    assert all(point["remedy"] for point in shown["points"] if point["state"] != "ok")
    assert shown["summary"]["fail"] == 0


@pytest.mark.slow
def test_doctor_shows_what_was_measured_and_measures_again(
    dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPSIM_CACHE_DIR", str(tmp_path))
    code, out, _ = dpsim("doctor")
    assert code == 0 and "not measured yet" in out
    monkeypatch.setattr("dpsim.harness.doctor.TUNED_NETWORKS", [("mlp:5,6,7,8,9", (4, 4, 1))])
    shown = _object(dpsim, "doctor", "--tune")
    choices = shown["summary"]["choices"]
    assert len(choices["kernels"]) > 20 and [one["devices"] for one in choices["selections"]] == [2]
    code, out, _ = dpsim("doctor")
    assert code == 0 and f"{len(choices['kernels'])} operations measured on" in out
    assert _object(dpsim, "doctor")["summary"]["choices"] == choices


def test_doctor_proposes_only_what_it_measured(dpsim: Dpsim, tmp_path: Path) -> None:
    code, _, err = dpsim("doctor", "--propose", tmp_path / "table.json")
    assert code == 2 and "add --tune" in err and not (tmp_path / "table.json").exists()


def test_doctor_says_what_to_do_without_mpi(dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpsim.launch.jobs.mpiexec_path", lambda: None)
    code, out, _ = dpsim("doctor")
    assert code == 1
    assert "pip install -e '.[mpich]'" in out
    assert "not working: launcher, MPI" in out


def test_train(dpsim: Dpsim, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    run = ("train", "--model", "mlp:16", "--devices", "2", "--global-batch", "64", "--steps", "3", "--output", output)
    shown = _object(dpsim, *run)
    assert {"test_accuracy", "test_loss", "final_loss", "images_per_s", "step_s", "digest"} <= set(shown["summary"])
    assert shown["summary"]["steps"] == 3
    written = json.loads(output.read_text())
    assert len(written["losses"]) == 3 and written["command"] == "train"
    assert (written["model"], written["dataset"], written["global_batch"]) == ("mlp:16", "digits", 64)


@pytest.mark.slow
def test_profile_and_calibrate_write_files_that_predict_reads(dpsim: Dpsim, tmp_path: Path) -> None:
    workload, machine = tmp_path / "w.json", tmp_path / "m.json"
    shown = _object(dpsim, "profile", "--model", "mlp:16", "--local-batch", "8,16", "--output", workload)
    assert [point["local_batch"] for point in shown["points"]] == [8, 16]
    shown = _object(
        dpsim, "calibrate", "--devices", "2", "--set", "overlap=poll", "--budget", "1ms", "--output", machine
    )
    assert {"devices", "algorithm", "size_bytes", "time_s"} <= set(shown["points"][0])
    shown = _object(
        dpsim, "predict", "--workload", workload, "--machine", machine, "--devices", "2", "--global-batch", "32"
    )
    assert shown["points"][0]["predicted_step_s"] > 0


@pytest.mark.parametrize("command", ["predict", "report", "trace", "doctor"])
def test_without_json_people_get_text(command: str, dpsim: Dpsim, folder: Path) -> None:
    arguments = {
        "predict": (*PREDICT, "--devices", "1,2", "--global-batch", "64"),
        "report": ("report", folder),
        "trace": ("report", folder, "--trace", "--output", folder / "trace.json"),
        "doctor": ("doctor",),
    }[command]
    code, out, _ = dpsim(*arguments)
    assert code == 0
    assert out.strip()
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(out)
