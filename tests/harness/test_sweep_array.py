"""Sweeps as job arrays, without a scheduler: parts, their records joined, the script, and mistakes in one message."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_factory import ENVIRONMENT, sweep

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.experiments.bench_predict import resnet50
from dpsim.harness.sweep.array import ArrayStudy, job_array
from dpsim.harness.sweep.check import check
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.experiment import predict_experiment
from dpsim.harness.sweep.parts import joined_predictions, parts_of, split
from dpsim.harness.sweep.questions import completed, group_name
from dpsim.launch.job_array import JobArray
from dpsim.machine import Link, Machine
from dpsim.records.sweep import Experiment, PredictedPoint, Predictions
from dpsim.study.inputs import SCHEMA, Inputs, Prepared, kinds_of

Dpsim = Callable[..., tuple[int, str, str]]
AXES: dict[str, tuple[Any, ...]] = {
    "network": ("node", "paced:50us,1gbit", "paced:1ms,200mbit"),
    "model": ("mlp:64x4", "mlp:16x3"),
    "devices": (1, 2, 4),
    "algorithm": ("ring", "halving-doubling"),
    "fusion_threshold_bytes": (0.0, 4096.0, math.inf),
    "accumulate": (1, 2),
}
RINGS = """\
schema = "dpsim.experiment/2"
name = "rings"
budget_s = 4
base = {model = "mlp:16x3", devices = 2, overlap = "off", global_batch = 64}
axes = {network = ["node", "paced:50us,1gbit"], algorithm = ["ring", "halving-doubling"]}
"""


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    """A sweep that compares some of the values of some axes."""
    names = draw(st.lists(st.sampled_from([*AXES]), min_size=1, max_size=4, unique=True))
    axes = {name: AXES[name][: draw(st.integers(1, len(AXES[name])))] for name in names}
    base = {"model": "mlp:16x3", "devices": 2, "global_batch": 64, "overlap": "off"}
    compared = tuple(draw(st.lists(st.sampled_from([*axes]), max_size=2, unique=True)))
    return Experiment(base={k: v for k, v in base.items() if k not in axes}, axes=axes, compared=compared)


@given(experiments())
def test_parts_are_a_partition_and_each_group_and_each_kind_is_whole(experiment: Experiment) -> None:
    parts = parts_of(experiment)
    number_of = {setting: number for number, part in enumerate(parts) for setting in part.settings}
    settings = [setting for part in parts for setting in part.settings]
    assert sorted(settings, key=lambda each: each.order) == sorted(experiment.settings, key=lambda each: each.order)
    assert math.isclose(sum(part.budget_s for part in parts), experiment.budget_s)
    for key in (lambda each: group_name(experiment, each), kinds_of):
        numbers: dict[Any, set[int]] = {}
        for setting in experiment.settings:
            numbers.setdefault(key(setting), set()).add(number_of[setting])
        assert {len(each) for each in numbers.values()} == {1}


def test_the_groups_of_each_network_are_a_part_with_the_device_over_which_their_speedup_is_taken() -> None:
    parts = parts_of(sweep(devices=(1, 2, 4))[0].experiment)
    assert [part.values("network") for part in parts] == [("node",), ("paced:50us,1gbit",)]
    assert [part.values("devices") for part in parts] == [(1, 2, 4), (1, 2, 4)]


def predicted(experiment: Experiment) -> Predictions:
    """Predict an experiment whose networks have machines, and whose models have workloads, of their own."""
    workloads, machines = dict[str, int](), dict[str, int]()
    indices = {
        kinds_of(each): (
            workloads.setdefault(each.model, len(workloads)),
            machines.setdefault(each.network, len(machines)),
        )
        for each in experiment.settings
    }
    scale = {"node": 1e-5, "paced:50us,1gbit": 5e-5, "paced:1ms,200mbit": 1e-3}
    plain = resnet50()
    layers = {"mlp:64x4": plain.layers, "mlp:16x3": plain.layers[:20]}
    prepared = Prepared(
        workloads=tuple(msgspec.structs.replace(plain, name=name, layers=layers[name]) for name in workloads),
        machines=tuple(
            Machine(
                name=name,
                network=name,
                emulated_network=name != "node",
                link=Link(latency_s=scale[name], bandwidth_bytes_per_s=1e9),
            )
            for name in machines
        ),
        indices=indices,
    )
    return predict_experiment(experiment, prepared, ENVIRONMENT)


def described(predictions: Predictions, point: PredictedPoint) -> tuple[Any, ...]:
    plain = msgspec.structs.replace(point, workload=0, machine=0)
    return codec.to_json(plain), *map(codec.to_json, predictions.made_from(point))


def test_the_predictions_of_the_parts_joined_are_those_of_the_whole() -> None:
    axes = {name: AXES[name] for name in ("network", "model", "algorithm", "fusion_threshold_bytes")}
    axes |= {"devices": (1, 4)}
    experiment = completed(Experiment(base={"global_batch": 64, "overlap": "off"}, axes=axes))
    whole = predicted(experiment)
    joined = joined_predictions(experiment, [predicted(part) for part in parts_of(experiment)])
    assert len(parts_of(experiment)) == 6
    assert {described(whole, point) for point in whole.points} == {described(joined, each) for each in joined.points}
    assert len(joined.points) == len(whole.points)
    assert joined.mechanisms == whole.mechanisms and len(whole.mechanisms) == 6


def test_the_same_samples_make_the_same_comparison_whether_tasks_or_one_job_took_them() -> None:
    predictions, results = sweep()
    whole = compare(predictions, results)
    joined = joined_predictions(predictions.experiment, split(predictions)[::-1])
    joined = msgspec.structs.replace(joined, mechanisms=predictions.mechanisms)
    backwards = msgspec.structs.replace(results, points=results.points[::-1], predictions_sha256=codec.digest(joined))
    again = compare(joined, backwards)
    assert [each.setting for each in again.points] == [each.setting for each in whole.points]
    for name in ("groups", "networks", "overlap", "chosen_overlap", "not_measured", "compared"):
        assert getattr(again, name) == getattr(whole, name), name


def jobs(token: str) -> JobArray:
    return job_array(token, sweep()[0].experiment)


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("slurm", {}),
        ("slurm:", {}),
        ("slurm:time=1-00:00:00,queue=short", {"time": "1-00:00:00", "queue": "short"}),
        ("pbs:account=x,name=mine,cpus=8", {"account": "x", "name": "mine", "cpus": 8}),
    ],
)
def test_a_token_says_what_each_task_is_given(token: str, expected: dict[str, Any]) -> None:
    job = jobs(token).job
    defaults = {"time": "01:00:00", "queue": "", "account": "", "name": "fusion-threshold", "cpus": 2}
    assert {name: getattr(job, name) for name in defaults} == defaults | expected
    assert job.scheduler == token.partition(":")[0]


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("slrm", "unknown scheduler 'slrm'.*did you mean 'slurm'"),
        ("task:1", "unknown scheduler 'task'"),
        ("slurm:tim=1", "unknown option of 'slurm:tim=1': 'tim'.*did you mean 'time'"),
        ("slurm:time=soon", "time is 'soon'"),
        ("slurm:at-once=0", "at-once is '0'"),
        ("slurm:cpus=many", "cpus is 'many'"),
        ("slurm:queue=a b", "queue is 'a b'"),
    ],
)
def test_a_wrong_token_is_one_message(token: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        jobs(token)


@pytest.mark.parametrize(("token", "index"), [("slurm:at-once=2", "0,2-3,5%2"), ("pbs:at-once=2", "0-5%2")])
def test_the_script_is_shell_and_asks_for_the_missing_tasks(token: str, index: str, tmp_path: Path) -> None:
    script = jobs(token).script(tmp_path / "folder", "abc", [0, 2, 3, 5], ["--json"])
    parts = script.split("<<'TASK'\n")[1].split("\nTASK\n")[0], script.split("<<'LAST'\n")[1].split("\nLAST\n")[0]
    for text in (script, *parts):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert index in parts[0] and f"{tmp_path}/folder/tasks/" in parts[0]
    assert "--array last,of=abc" in parts[1] and parts[1].endswith("--json")


def fake_scheduler(folder: Path, program: str) -> None:
    """Write a program that keeps what it is given, and prints the id of a job."""
    (folder / "bin").mkdir()
    path = folder / "bin" / program
    path.write_text(
        f'#!/bin/bash\nn=$(($(ls {folder} | grep -c given) + 1))\n{{ echo "$@"; cat; }} >{folder}/given-$n\necho 7$n\n'
    )
    path.chmod(0o755)


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_an_array_is_submitted_once_with_a_last_job_that_waits_for_it(
    scheduler: str, tmp_path: Path, dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_scheduler(tmp_path, {"slurm": "sbatch", "pbs": "qsub"}[scheduler])
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    Path("rings.toml").write_text(RINGS)
    code, shown, err = dpsim("sweep", "rings.toml", "--output", "out", "--array", scheduler)
    assert code == 0, err
    assert f"Submitted {scheduler} job 71 and 72: 2 of 2 tasks, and the report." in shown
    first, last = (Path(name).read_text() for name in ("given-1", "given-2"))
    assert "task:$SLURM_ARRAY_TASK_ID,of=" in first or "task:$PBS_ARRAY_INDEX,of=" in first
    assert "afterany:71" in last.splitlines()[0] and "--array last,of=" in last
    array_id = json.loads(Path("out/array.json").read_text())["id"]
    assert f"of={array_id} " in first and f"of={array_id} " in last
    assert dpsim("sweep", "rings.toml", "--output", "out", "--array", scheduler)[0] == 0
    assert json.loads(Path("out/array.json").read_text())["id"] == array_id


def refused(dpsim: Dpsim, *words: str | Path) -> str:
    code, shown, err = dpsim("sweep", *words)
    assert (code, shown) == (2, "") and "Traceback" not in err, err
    return err


def test_a_dry_run_prints_the_script_and_changes_nothing(
    tmp_path: Path, dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rings.toml").write_text(RINGS)
    code, shown, err = dpsim("sweep", "rings.toml", "--output", "out", "--array", "slurm", "--dry-run")
    assert (code, err) == (0, "") and "#SBATCH --array=0-1\n" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["rings.toml"]
    assert "--dry-run without --array" in refused(dpsim, "rings.toml", "--dry-run")


def test_what_cannot_be_an_array_is_one_message(tmp_path: Path, dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    Path("rings.toml").write_text(RINGS)
    words = ("rings.toml", "--output", "out", "--array")
    assert "there is no sbatch on PATH" in refused(dpsim, *words, "slurm")
    assert "there is no qsub on PATH" in refused(dpsim, *words, "pbs")
    assert not Path("out").exists()
    Path("nodes.toml").write_text(RINGS.replace("devices = 2", 'devices = "2x2"'))
    assert "settings of several nodes (devices 2x2)" in refused(dpsim, "nodes.toml", *words[1:], "slurm")
    Path("out").mkdir()
    codec.write(Path("out/array.json"), {"schema": "dpsim.array/1", "id": "a", "experiment": {"name": "other"}})
    assert "holds the array of another experiment" in refused(dpsim, *words, "slurm", "--dry-run")
    assert "holds a sweep that a job array measures" in refused(dpsim, *words[:-1])


def test_a_job_that_does_not_see_the_folder_says_so(tmp_path: Path, dpsim: Dpsim) -> None:
    folder = tmp_path / "out"
    for array in ("task:0,of=b", "last,of=b"):
        assert "it has no array.json" in refused(dpsim, "--output", folder, "--array", array)
    assert not folder.exists()
    folder.mkdir()
    codec.write(folder / "array.json", {"schema": "dpsim.array/1", "id": "a", "experiment": {"name": "other"}})
    assert "it has another array.json" in refused(dpsim, "--output", folder, "--array", "task:0,of=b")


def run_tasks(dpsim: Dpsim, folder: Path, numbers: Sequence[int]) -> None:
    for number in numbers:
        code, _, err = dpsim("sweep", "--output", folder, "--array", f"task:{number},of=a")
        assert code == 0, err


def test_the_last_job_names_what_is_missing_and_then_makes_the_report_that_can_be_checked(
    tmp_path: Path, dpsim: Dpsim
) -> None:
    folder = tmp_path / "out"
    file = tmp_path / "rings.toml"
    file.write_text(RINGS)
    study = ArrayStudy.of(codec.read(file, Experiment, "experiment", "dpsim.experiment/2"))
    codec.write(folder / "array.json", {"schema": "dpsim.array/1", "id": "a", "experiment": study.experiment})
    run_tasks(dpsim, folder, [1])
    before = (folder / "tasks" / "1" / "samples.json").read_bytes()
    (folder / "tasks" / "0.out").write_text("began\nwas killed\n")
    said = refused(dpsim, "--output", folder, "--array", "last,of=a")
    assert "1 of 2 tasks of" in said and "(task 0: was killed)" in said and "submits these tasks" in said
    run_tasks(dpsim, folder, [0, 1, 2])
    assert (folder / "tasks" / "1" / "samples.json").read_bytes() == before
    code, shown, err = dpsim("sweep", "--output", folder, "--array", "last,of=a")
    assert code == 0, err
    assert "report.md" in shown or "index.html" in shown
    code, shown, err = dpsim("report", folder, "--check")
    assert code == 0 and "verified: both predictions follow from inputs.json" in shown, shown + err
    assert dpsim("sweep", file, "--output", folder)[0] == 0  # it is a finished sweep as any other
    inputs = codec.read(folder / "inputs.json", Inputs, "inputs", SCHEMA)
    later = tuple(msgspec.structs.replace(part, measured_until="later") for part in inputs.parts)
    codec.write_record(folder / "inputs.json", msgspec.structs.replace(inputs, parts=later))
    assert "inputs.json has another SHA-256" in check(folder).damage
