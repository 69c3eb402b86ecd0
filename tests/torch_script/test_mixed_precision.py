"""Scripts in mixed precision: what a profile says they send, against what PyTorch sends on two ranks of gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lowering_cases import chain
from msgspec.structs import replace

from dpsim import codec
from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.harness.script.experiment import completed, script_experiment
from dpsim.harness.script.places import inputs_for
from dpsim.lowering import lower
from dpsim.machine import Link, Machine
from dpsim.model.points import predict_grid, script_defaults
from dpsim.plan import Plan
from dpsim.schedule import KINDS
from dpsim.setting import Grid
from dpsim.study.environment import environment
from dpsim.workload import Tensor, Workload

SCRIPT = Path(__file__).parents[1] / "support" / "mixed_precision.py"
CAP_BYTES = 0.002 * 2**20
BY_DDP = ("autocast", "scaler", "parameters", "some parameters")
BY_FSDP = ("policy", "policy reduces in float32", "float16 policy")

Results = dict[str, Any]


def started(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, SCRIPT, *arguments], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each way to train sends in a step of two ranks."""
    store = str(tmp_path_factory.mktemp("sent") / "store")
    results, _ = [rank.communicate(timeout=500)[0] for rank in [started(str(rank), store) for rank in range(2)]]
    return json.loads(results)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def profiles() -> Results:
    """Of each way to train its workload as one of two ranks, when recorded steps began, and when skipped ones did."""
    return json.loads(started("profile").communicate(timeout=500)[0])  # type: ignore[no-any-return]


def workload_of(profiles: Results, mode: str) -> Workload:
    return codec.decode(profiles[mode][0], Workload, "workload")


def types(workload: Workload) -> set[tuple[str, str, str]]:
    return {(each.dtype, each.gathered, each.reduced) for each in workload.tensors}


@pytest.mark.torch
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", BY_DDP)
def test_the_buckets_are_those_that_ddp_logs_on_two_ranks(mode: str, sent: Results, profiles: Results) -> None:
    workload, logged = workload_of(profiles, mode), tuple(map(int, sent[mode]["buckets"].split(",")))
    schedule = lower(workload, Plan(devices=2, global_batch=8, fusion_rule="ddp", fusion_threshold_bytes=CAP_BYTES))
    assert workload.ddp is not None and workload.ddp.bucket_bytes == logged == (*schedule.summed_bytes.tolist(),)
    own = {"parameters": {"bfloat16"}, "some parameters": {"bfloat16", "float32"}}.get(mode, {"float32"})
    assert types(workload) == {(each, each, each) for each in own}


@pytest.mark.torch
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", BY_FSDP)
def test_every_gather_and_reduce_scatter_has_the_bytes_that_fsdp_sends(
    mode: str, sent: Results, profiles: Results
) -> None:
    workload, calls = workload_of(profiles, mode), sent[mode]["calls"]
    schedule = lower(workload, Plan(devices=2, global_batch=8, fusion_rule="fsdp", strategy="zero3:prefetch=0"))
    rows = np.concatenate([schedule.parameter_collectives, schedule.gradient_collectives])
    predicted = [(KINDS[schedule.kind[row]], int(schedule.size_bytes[row])) for row in rows]
    assert sorted(predicted) == sorted((kind, size) for kind, size, _ in calls)
    gathered, reduced = (
        {dtype for kind, _, dtype in calls if kind == wanted} for wanted in ("all-gather", "reduce-scatter")
    )
    assert types(workload) == {("float32", *gathered, *reduced)}


@pytest.mark.torch
@pytest.mark.timeout(1200)
def test_a_step_that_the_scaler_skips_is_none(profiles: Results) -> None:
    _, recorded_s, skipped_s = profiles["overflowing scaler"]
    assert len(recorded_s) >= 3 and skipped_s and not {*recorded_s} & {*skipped_s}
    assert recorded_s[0] < skipped_s[-1], "some of them between the steps that are recorded"


@pytest.mark.torch
def test_ddp_with_mixed_precision_of_its_own_is_refused_by_name() -> None:
    import torch  # noqa: F401

    from dpsim.torch.script.probe.endings import Refused
    from dpsim.torch.script.probe.record import Recorder

    with pytest.raises(Refused, match="gives DistributedDataParallel mixed_precision"):
        Recorder(3).built(SimpleNamespace(mixed_precision=SimpleNamespace()))


@pytest.mark.torch
def test_optimizer_state_counts_by_its_bytes_and_float32_copies_of_parameters_with_it() -> None:
    import torch

    from dpsim.torch.script.probe.rank_record import optimizer_slots

    for module_type, copied, slots in (("float32", False, 2), ("bfloat16", False, 2), ("bfloat16", True, 6)):
        module = torch.nn.Linear(4, 3).to(getattr(torch, module_type))
        trained = [torch.nn.Parameter(each.detach().float()) if copied else each for each in module.parameters()]
        optimizer = torch.optim.AdamW(trained)
        for each in trained:
            each.grad = torch.ones_like(each)
        optimizer.step()
        assert optimizer_slots(optimizer, module) == slots
    assert optimizer_slots(None, module) is None


def of_bfloat16(hook: str = "") -> Workload:
    """A workload of a script whose parameters are bfloat16, and which may have a hook."""
    workload = chain(3)
    layers = [
        replace(each, tensors=tuple(replace(t, dtype="bfloat16") for t in each.tensors)) for each in workload.layers
    ]
    ddp = DdpSettings(torch="2.13.0", devices=2, communication_hook=hook)
    return replace(workload, layers=tuple(layers), ddp=ddp)


def test_parameters_of_bfloat16_are_measured_by_gloo_alone(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    experiment = completed(script_experiment(script=str(script)), of_bfloat16())
    assert tuple(experiment.values("runtime")) == ("torch-ddp-gloo",)
    (calibration,) = inputs_for(experiment, of_bfloat16(), environment()).calibrations
    assert calibration.reduce_dtype == "bfloat16"
    with pytest.raises(ConfigError, match="gradients of bfloat16"):
        completed(script_experiment(script=str(script), communication=("mpi",)), of_bfloat16())


def test_gradients_of_16_bits_are_not_made_smaller_again() -> None:
    machine = Machine(name="m", link=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9))
    grid, workload = Grid.of(devices=2, algorithm="direct"), of_bfloat16("bf16_compress_hook")
    assert script_defaults(workload, grid).fields.keys() == {"fusion_rule"}
    assert "wire_dtype" in script_defaults(replace(workload, layers=chain(3).layers), grid).fields
    with pytest.raises(ConfigError, match="whose gradients are bfloat16"):
        predict_grid(of_bfloat16(), machine, Grid.of(devices=2, algorithm="direct", wire_dtype="float16"))


def test_a_tensor_is_gathered_and_reduced_in_types_that_there_are() -> None:
    assert Tensor(name="w", shape=(5, 2), gather_dtype="bfloat16").gathered == "bfloat16"
    assert Tensor(name="w", shape=(5, 2), dtype="bfloat16").reduced == "bfloat16"
    assert [Tensor(name="w", shape=shape).padded(4) for shape in ((5, 2), (), (0, 3))] == [16, 4, 0]
    with pytest.raises(ConfigError, match="reduce_dtype 'int8'"):
        Tensor(name="w", shape=(5, 2), reduce_dtype="int8")
