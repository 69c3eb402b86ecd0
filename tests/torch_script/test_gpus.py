"""DDP by NCCL, as far as it can be said without a GPU: what is refused, and what a prediction is made of."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpsim import codec
from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.harness.script import gpus
from dpsim.harness.script.experiment import completed, script_experiment
from dpsim.launch import child_process
from dpsim.launch.job_python import OWN
from dpsim.lowering import lower
from dpsim.machine import AllreduceCost, Machine
from dpsim.records.sweep import read_predictions
from dpsim.schedule import COMMUNICATION_LANE
from dpsim.setting import settings_of
from dpsim.workload import Layer, Tensor, Workload

Dpsim = Callable[..., tuple[int, str, str]]
LAYERS, SMALLEST_S = 3, 50e-6


def a_workload(*, sync_batch_norm: bool = False) -> Workload:
    """A profile of a script, with a batch norm in every layer."""
    layers = tuple(
        Layer(
            name=f"{number}",
            kind="module",
            forward_s=(1e-3,),
            backward_s=(2e-3,),
            tensors=(Tensor(name=f"{number}.weight", shape=(64, 64)),),
            batch_norm_channels=64,
        )
        for number in range(LAYERS)
    )
    ddp = DdpSettings(torch="2.13.0", devices=2, sync_batch_norm=sync_batch_norm)
    return Workload(name="three", local_batches=(8,), layers=layers, ddp=ddp)


def a_machine(algorithm: str = "nccl") -> Machine:
    sizes, seconds = (64, 2**20), (SMALLEST_S, 4 * SMALLEST_S)
    table = AllreduceCost(algorithm=algorithm, devices=2, sizes_bytes=sizes, time_s=seconds)
    return Machine(name="two GPUs", allreduce=(table,))


def a_script(folder: Path, text: str = "") -> Path:
    script = folder / "train.py"
    script.write_text(text)
    return script


def predicted(dpsim: Dpsim, folder: Path, workload: Workload) -> list[dict[str, Any]]:
    """The points of ``--predict-only`` for NCCL, from this workload and the machine."""
    codec.write(folder / "w.json", workload)
    codec.write(folder / "m.json", a_machine())
    files = ("--workload", folder / "w.json", "--machine", folder / "m.json", "--output", folder / "report")
    flags = ("--algorithm", "nccl", "--fusion-threshold", "0,inf", "--predict-only", "--json")
    code, out, err = dpsim("sweep", "--torch-script", a_script(folder), *files, *flags)
    assert code == 0, err
    points: list[dict[str, Any]] = json.loads(out)["points"]
    return points


@pytest.mark.torch
def test_a_prediction_needs_no_gpu_where_the_profile_and_the_machine_are_given(dpsim: Dpsim, tmp_path: Path) -> None:
    points = predicted(dpsim, tmp_path, a_workload())
    assert [(point["runtime"], point["network"], point["buckets"]) for point in points] == [
        ("torch-ddp-nccl", "node", LAYERS),
        ("torch-ddp-nccl", "node", 1),
    ]
    plan = read_predictions(tmp_path / "report" / "predictions.json").points[0].setting.plan
    assert (plan.algorithm, plan.overlap, plan.batch_norm) == ("nccl", "thread", "local")
    assert all(point["predicted_step_s"] > LAYERS * 3e-3 for point in points), "computation, and exposed communication"


@pytest.mark.torch
def test_synchronised_batch_norm_adds_two_sums_a_layer_to_the_prediction(dpsim: Dpsim, tmp_path: Path) -> None:
    steps_s = []
    for sync_batch_norm in (False, True):
        folder = tmp_path / str(sync_batch_norm)
        folder.mkdir()
        points = predicted(dpsim, folder, a_workload(sync_batch_norm=sync_batch_norm))
        steps_s.append(points[-1]["predicted_step_s"])
    added_s = steps_s[1] - steps_s[0]
    assert added_s >= 0.99 * (2 * LAYERS - 1) * SMALLEST_S, "each as long as an allreduce; the last beside the bucket"
    config = script_experiment(script=str(a_script(tmp_path)), communication=("nccl",), caps_bytes=(0.0,))
    (setting,) = settings_of(completed(config, a_workload(sync_batch_norm=True)).rows)
    schedule = lower(a_workload(), setting.plan)
    assert setting.plan.batch_norm == "global"
    assert sum(schedule.bucket[schedule.lane == COMMUNICATION_LANE] < 0) == 2 * LAYERS


def test_synchronised_batch_norm_is_refused_on_processors(tmp_path: Path) -> None:
    config = script_experiment(script=str(a_script(tmp_path)))
    with pytest.raises(ConfigError, match="SyncBatchNorm by gloo and mpi, where PyTorch has it for GPUs alone"):
        completed(config, a_workload(sync_batch_norm=True))


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (["2.13.0+cpu", 0, False], "on 2 ranks, where PyTorch 2.13.0+cpu sees 0 CUDA GPUs and has no NCCL"),
        (["2.13.0", 1, True], "where PyTorch 2.13.0 sees 1 CUDA GPUs"),
        (["2.13.0", 2, False], "sees 2 CUDA GPUs and has no NCCL"),
        (["2.13.0", 2, True], ""),
    ],
)
def test_a_measurement_needs_nccl_and_a_gpu_for_each_rank(
    answer: list[Any], given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> Any:
        return subprocess.CompletedProcess([], 0, json.dumps(answer), "")

    monkeypatch.setattr(child_process, "run", run)
    if not given:
        gpus.check_gpus(2, OWN)
        return
    with pytest.raises(ConfigError) as refused:
        gpus.check_gpus(2, OWN)
    assert given in str(refused.value)


@pytest.mark.torch
def test_without_gpus_a_measurement_is_refused_before_anything_runs(dpsim: Dpsim, tmp_path: Path) -> None:
    import torch

    if torch.cuda.device_count() > 1:
        pytest.skip("this machine has two GPUs")
    codec.write(tmp_path / "m.json", a_machine())
    flags = ("--algorithm", "nccl", "--machine", tmp_path / "m.json", "--output", tmp_path / "report")
    code, out, err = dpsim("sweep", "--torch-script", a_script(tmp_path), *flags)
    assert (code, out) == (2, "") and "--algorithm nccl on 2 ranks" in err and "Traceback" not in err
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("machine", "given"),
    [(None, "--algorithm nccl without --machine"), (a_machine("ring"), "which has no times of it")],
)
def test_the_times_of_nccl_have_to_be_given(machine: Machine | None, given: str, tmp_path: Path) -> None:
    config = script_experiment(script=str(a_script(tmp_path)), communication=("nccl",))
    with pytest.raises(ConfigError, match=given):
        gpus.predicted_by_nccl(config, a_workload(), machine, OWN, [].append)


@pytest.mark.torch
def test_a_machine_is_refused_where_it_is_calibrated_here(dpsim: Dpsim, tmp_path: Path) -> None:
    codec.write(tmp_path / "m.json", a_machine())
    files = ("--machine", tmp_path / "m.json", "--output", tmp_path / "report")
    code, _, err = dpsim("sweep", "--torch-script", a_script(tmp_path), *files)
    assert code == 2 and "--machine with --algorithm gloo,mpi" in err


SYNCHRONISED = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
ddp = DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))
while True:
    ddp(torch.randn(4, 8)).sum().backward()
"""


@pytest.mark.torch
def test_a_script_with_synchronised_batch_norm_on_a_processor_is_explained(dpsim: Dpsim, tmp_path: Path) -> None:
    script, output = a_script(tmp_path, SYNCHRONISED), tmp_path / "w.json"
    code, out, err = dpsim("profile", "--torch-script", script, "--devices", "2", "--output", output)
    assert (code, out) == (2, "") and "Traceback" not in err
    assert "train.py:6: a model with SyncBatchNorm on the processor, where PyTorch has it for GPUs alone" in err
    assert "dpsim predict --set batch_norm=local,global says what it costs" in err


@pytest.mark.torch
def test_it_is_told_from_batch_norm_of_each_rank() -> None:
    import torch

    from dpsim.torch.script.probe.script_record import synchronises_batch_norm

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    assert not synchronises_batch_norm(model)
    assert synchronises_batch_norm(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))


@pytest.mark.torch
def test_ranks_on_gpus_meet_by_nccl_and_each_has_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch
    from torch.distributed import distributed_c10d

    from dpsim.torch.script.probe import process_group

    devices: list[int] = []
    groups: list[tuple[Any, ...]] = []
    replaced: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(distributed_c10d, "init_process_group", lambda *given, **_: groups.append(given))
    monkeypatch.setattr(process_group, "replace_everywhere", lambda _, function: replaced.append(function))
    for on_gpus in (True, False):
        process_group.connect(str(tmp_path / f"store-{on_gpus}"), 1, 2, on_gpus=on_gpus)
        replaced[-1]("gloo")
    assert devices == [1] and groups == [("cpu:gloo,cuda:nccl",), ("gloo",)]
