"""Scripts with ``fully_shard``: profiled, measured and predicted as zero3; what cannot be predicted is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import numpy as np
import pytest
from lowering_cases import chain

from dpsim import workload as workloads
from dpsim.constraints import FSDP
from dpsim.ddp_settings import FSDP_ON_GPUS, DdpSettings, ShardedUnit
from dpsim.errors import ConfigError
from dpsim.harness.script.experiment import completed, script_experiment
from dpsim.harness.script.own_runtime import other_settings
from dpsim.harness.script.places import inputs_for
from dpsim.lowering import lower
from dpsim.machine import AllreduceCost, Machine
from dpsim.model import predict
from dpsim.model.cost import idle_curve
from dpsim.plan import Plan
from dpsim.records.sweep import read_results
from dpsim.schedule import ALL_GATHER_EVENT, REDUCE_SCATTER_EVENT, SYNCHRONISE_EVENT
from dpsim.setting import settings_of
from dpsim.study.environment import environment
from dpsim.torch.script.profile_script import profile_script
from dpsim.torch.script.request import ScriptRequest
from dpsim.workload import Workload

Dpsim = Callable[..., tuple[int, str, str]]
OnRanks = Callable[..., Any]
UNITS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])

def train(model, optimizer, accumulate=1, defers=lambda micro_batch, last: not last):
    while True:
        for micro_batch in range(accumulate):
            model.set_requires_gradient_sync(not defers(micro_batch, micro_batch == accumulate - 1))
            model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def shard(model, **given):
    fully_shard(model[1], reshard_after_forward=False)
    fully_shard(model[2])
    fully_shard(model, **given)
    return torch.optim.AdamW(model.parameters())
"""


def a_script(folder: Path, text: str) -> Path:
    script = folder / "sharded.py"
    script.write_text(UNITS + dedent(text))
    return script


def sharded(layers: int = 4, kept: tuple[int, ...] = (0,)) -> Workload:
    """A workload of units, of which the kept ones stay from forward to backward."""
    workload = chain(layers)
    units = tuple(
        ShardedUnit(
            name=layer.name, size_bytes=sum(each.size_bytes for each in layer.tensors), reshard=number not in kept
        )
        for number, layer in enumerate(workload.layers)
    )
    return msgspec.structs.replace(workload, ddp=DdpSettings(torch="2.13.0", devices=2, units=units))


def plan_of(accumulate: int = 1, **others: Any) -> Plan:
    fields: dict[str, Any] = {"strategy": "zero3:prefetch=0", "algorithm": "gloo", "overlap": "inline"} | others
    return Plan(devices=2, global_batch=4 * accumulate, accumulate=accumulate, fusion_rule="fsdp", **fields)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_each_unit_is_gathered_for_a_forward_and_again_for_a_backward_where_it_was_given_up(prefetch: int) -> None:
    schedule = lower(sharded(4, kept=(0, 2)), plan_of(strategy=f"zero3:prefetch={prefetch}"))
    gathers = schedule.parameter_collectives
    assert schedule.bucket[gathers].tolist() == [3, 2, 1, 0, 0, 2], "bucket 0 is the last layer"
    assert SYNCHRONISE_EVENT not in schedule.kind and schedule.parameter_slots == schedule.gradient_slots == 0
    assert np.count_nonzero(schedule.kind == REDUCE_SCATTER_EVENT) == 4
    for gather in gathers.tolist():
        users = [row for row in range(len(schedule.kind)) if gather in schedule.dependencies(row)]
        assert users and all(row > gather for row in users)


def test_every_micro_batch_gathers_anew_and_a_strategy_without_reshard_gathers_once_a_pass() -> None:
    twice = lower(sharded(3, kept=()), plan_of(accumulate=2))
    assert np.count_nonzero(twice.kind == ALL_GATHER_EVENT) == 2 * 2 * 3
    assert np.count_nonzero(twice.kind == REDUCE_SCATTER_EVENT) == 3
    kept = lower(sharded(3, kept=()), plan_of(strategy="zero3:prefetch=0,reshard=no"))
    assert np.count_nonzero(kept.kind == ALL_GATHER_EVENT) == 3


def test_a_script_may_reduce_in_each_micro_batch_and_keep_its_units_whole_between_them() -> None:
    workload = sharded(3, kept=(0,))
    assert workload.ddp is not None
    units = tuple(msgspec.structs.replace(unit, reshard_after_backward=False) for unit in workload.ddp.units)
    each = msgspec.structs.replace(workload, ddp=msgspec.structs.replace(workload.ddp, deferred=False))
    whole = msgspec.structs.replace(workload, ddp=msgspec.structs.replace(workload.ddp, units=units))
    counts = [
        [np.count_nonzero(lower(one, plan_of(3)).kind == kind) for kind in (ALL_GATHER_EVENT, REDUCE_SCATTER_EVENT)]
        for one in (workload, each, whole)
    ]
    assert counts == [[3 * (3 + 2), 3], [3 * (3 + 2), 3 * 3], [3 + 3 * 2, 3]]


def test_accumulation_is_measured_where_fsdp_trains(tmp_path: Path) -> None:
    declared = script_experiment(script=str(a_script(tmp_path, "")), accumulates=(1, 4))
    settings = settings_of(completed(declared, sharded()).rows)
    assert [(each.runtime, each.plan.accumulate) for each in settings] == [(FSDP, 1), (FSDP, 4)]


def test_a_step_takes_its_computation_and_every_collective_one_after_another() -> None:
    workload = sharded(4, kept=(0,))
    halves = tuple(
        AllreduceCost(algorithm="gloo", devices=2, kind=kind, sizes_bytes=(4, 2**20), time_s=(seconds, seconds))
        for kind, seconds in (("all-gather", 1e-3), ("reduce-scatter", 3e-3))
    )
    machine = Machine(name="m", allreduce=(), halves=halves)
    prediction = predict(workload, machine, plan_of())
    times = workload.times(2)
    computed_s = float(times.forward_s.sum() + times.backward_s.sum()) + times.overhead_s + workload.update_s / 2
    assert prediction.exposed_communication_s == pytest.approx(7e-3 + 4 * 3e-3)
    assert prediction.step_s == pytest.approx(computed_s + 7e-3 + 4 * 3e-3)


def test_ddp_is_measured_beside_a_script_that_fsdp_shards_instead(tmp_path: Path) -> None:
    experiment = completed(script_experiment(script=str(a_script(tmp_path, "")), strategy="zero3"), sharded())
    assert experiment.other_runtimes == ("torch-ddp-gloo",)
    (other,) = other_settings(settings_of(experiment.rows), experiment.other_runtimes)
    assert (other.runtime, other.plan.strategy, other.plan.fusion_rule) == ("torch-ddp-gloo", "data-parallel", "ddp")
    own = completed(script_experiment(script=str(a_script(tmp_path, "")), devices=(1, 2)), sharded())
    assert other_settings(settings_of(own.rows), own.other_runtimes) == ()


def test_fsdp_is_measured_by_gloo_on_the_node_and_its_collectives_calibrated_at_its_units(tmp_path: Path) -> None:
    declared = script_experiment(script=str(a_script(tmp_path, "")), devices=(1, 2))
    experiment = completed(declared, sharded())
    settings = settings_of(experiment.rows)
    assert {setting.runtime for setting in settings} == {FSDP} and len(settings) == 2
    assert {(setting.plan.strategy, setting.plan.fusion_rule) for setting in settings} == {("zero3:prefetch=0", "fsdp")}
    (calibration,) = inputs_for(experiment, sharded(), environment()).calibrations
    assert {each.collective.kind for each in calibration.collectives()} == {"all-gather", "reduce-scatter"}
    assert sharded().ddp is not None
    assert calibration.sizes_bytes == tuple(sorted({unit.size_bytes for unit in sharded().ddp.units}))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"caps_bytes": (0.0, math.inf)}, "--fusion-threshold where FSDP trains"),
        ({"communication": ("mpi",)}, "communication other than gloo"),
        ({"communication": ("nccl",)}, "communication other than gloo"),
        ({"runtimes": ("torch-ddp", "dpsim"), "networks": ("node", "paced:1ms,1gbit")}, "--set runtime=dpsim"),
    ],
)
def test_what_fsdp_by_gloo_does_not_have_is_refused(changes: dict[str, Any], given: str, tmp_path: Path) -> None:
    declared = script_experiment(script=str(a_script(tmp_path, "")), **changes)
    with pytest.raises(ConfigError, match=given):
        completed(declared, sharded())
    with pytest.raises(ConfigError, match=given):
        script_experiment(script=str(a_script(tmp_path, "")), strategy="zero3", **changes)


def test_another_strategy_of_a_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'zero1'"):
        script_experiment(script=str(a_script(tmp_path, "")), strategy="zero1")


@pytest.mark.torch
def test_a_script_with_fully_shard_becomes_a_workload_of_its_units_that_predict_takes(
    dpsim: Dpsim, tmp_path: Path
) -> None:
    script, output = a_script(tmp_path, "train(model, shard(model), accumulate=2)"), tmp_path / "w.json"
    code, out, err = dpsim("profile", "--torch-script", script, "--devices", "3", "--steps", "6", "--output", output)
    assert code == 0, err
    assert "FSDP gathers 3 units, 2 of them once a step" in out
    workload = workloads.read(output)
    ddp = workload.ddp
    assert ddp is not None and (ddp.devices, ddp.accumulate, ddp.own_collectives) == (3, 2, 0)
    layer_bytes = 4 * (16 * 16 + 16)
    assert [(unit.name, unit.size_bytes, unit.reshard) for unit in ddp.units] == [
        ("", 2 * layer_bytes, False),
        ("1", layer_bytes, False),
        ("2", layer_bytes, True),
    ]
    assert [layer.name for layer in workload.layers] == ["model", "1", "2"]
    assert [tensor.shape for tensor in workload.layers[2].tensors] == [(16, 16), (16,)]
    assert all(layer.forward_s[0] > 0 and layer.backward_s[0] > 0 for layer in workload.layers)
    assert workload.update_s > 0 and workload.optimizer_slots == 2 and workload.local_batches == (4,)
    machine = tmp_path / "machine.toml"
    machine.write_text(
        'schema = "dpsim.machine/1"\nname = "m"\n[link]\nlatency_s = 1e-5\nbandwidth_bytes_per_s = 1e9\n'
    )
    code, out, err = dpsim("predict", "--workload", output, "--machine", machine, "--devices", "2", "--json")
    assert code == 0, err
    assert {point["strategy"] for point in json.loads(out)["points"]} == {"zero3"}


@pytest.mark.torch
def test_a_script_that_reduces_in_each_micro_batch_is_told_what_deferring_sends_and_needs(
    dpsim: Dpsim, tmp_path: Path
) -> None:
    script = a_script(tmp_path, "train(model, shard(model), accumulate=4, defers=lambda *_: False)")
    output = tmp_path / "w.json"
    code, out, err = dpsim("profile", "--torch-script", script, "--devices", "2", "--steps", "6", "--output", output)
    assert code == 0, err
    assert "4 micro-batches reduce 4 times; deferring (set_requires_gradient_sync) would send" in out
    ddp = workloads.read(output).ddp
    assert ddp is not None and (ddp.accumulate, ddp.deferred) == (4, False)


COUNTED = """
counts = dict.fromkeys(("all_gather_single", "reduce_scatter_single"), 0)

def count(name, original):
    def counted(*arguments, **keywords):
        counts[name] += 1
        return original(*arguments, **keywords)
    return counted

for name in counts:
    setattr(dist, name, count(name, getattr(dist, name)))
optimizer = shard(model)
while True:
    for last in (False, False, True):
        loss = model(torch.randn(4, 16)).sum()
        {flags}
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("{flags}:", *counts.values())  # lines that are alike are shown once
    counts.update(dict.fromkeys(counts, 0))
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("flags", "deferred", "whole"),
    [
        ("pass", False, False),
        ("model.set_requires_gradient_sync(last)", True, False),
        ("model.set_requires_gradient_sync(last); model.set_reshard_after_backward(last)", True, True),
    ],
    ids=["each", "deferred", "deferred and whole"],
)
def test_a_predicted_step_has_the_collectives_that_fsdp_calls(
    flags: str, deferred: bool, whole: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = a_script(tmp_path, COUNTED.replace("{flags}", flags))
    workload = profile_script(ScriptRequest(script=str(script), devices=2, steps=6))
    ddp = workload.ddp
    assert ddp is not None and (ddp.accumulate, ddp.deferred, ddp.late_flag) == (3, deferred, False)
    assert {unit.reshard_after_backward for unit in ddp.units} == {not whole}
    kind = lower(workload, plan_of(3)).kind
    gathers, scatters = (np.count_nonzero(kind == each) for each in (ALL_GATHER_EVENT, REDUCE_SCATTER_EVENT))
    assert f"{flags}: {gathers} {scatters}\n" in "".join(capfd.readouterr())


@pytest.mark.torch
def test_a_script_with_ddp_is_sharded_instead_a_unit_a_block_also_behind_its_optimizer(tmp_path: Path) -> None:
    text = """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ddp = DistributedDataParallel(model)
    while True:
        with ddp.no_sync():
            ddp(torch.randn(4, 16)).sum().backward()
        ddp(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    request = ScriptRequest(script=str(a_script(tmp_path, text)), devices=2, steps=6, fully_shard=True)
    workload = profile_script(request)
    assert workload.ddp is not None and workload.ddp.accumulate == 2
    assert [unit.name for unit in workload.ddp.units] == ["0", "1", "2", "3"]
    plain = profile_script(msgspec.structs.replace(request, fully_shard=False))
    assert plain.ddp is not None and not plain.ddp.units and plain.gradient_bytes == workload.gradient_bytes


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("shard(model, offload_policy=fsdp.CPUOffloadPolicy())", "offload"),
        ("shard(model, mesh=dist.device_mesh.init_device_mesh('cpu', (2, 2), mesh_dim_names=('a', 'b')))", "HSDP"),
        ("shard(model, reshard_after_forward=2)", "reshard_after_forward=2"),
        ("fully_shard([model[0], model[1]])", "a list of modules"),
        ("shard(model, shard_placement_fn=lambda parameter: None)", "shard_placement_fn"),
        ("fsdp.FullyShardedDataParallel(model)", "PyTorch's first FSDP"),
        (
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nshard(model)\ntrain(model, optimizer)",
            "builds its optimizer before fully_shard",
        ),
        (
            "optimizer = shard(model)\nmodel.set_reshard_after_backward(False)\ntrain(model, optimizer)",
            "set_reshard_after_backward",
        ),
        (
            "train(model, shard(model), accumulate=2, defers=lambda _, last: last)",
            "updates after a backward() that does not synchronise",
        ),
    ],
    ids=[
        *("offload", "HSDP", "part", "list", "placement", "first version", "optimizer", "backward"),
        "last",
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(text: str, given: str, dpsim: Dpsim, tmp_path: Path) -> None:
    script, output = a_script(tmp_path, text), tmp_path / "w.json"
    code, out, err = dpsim("profile", "--torch-script", script, "--devices", "4", "--output", output)
    assert (code, out, output.exists()) == (2, "", False)
    assert given in err and "Traceback" not in err


@pytest.mark.torch
def test_gradients_are_those_of_ddp(together: Callable[..., list[Any]], tmp_path: Path) -> None:
    folder = {"folder": str(tmp_path)}
    alone, *others = together(*(("ranks_torch:sharded_gradients", folder, devices) for devices in (1, 2, 3)))
    assert alone == ["", ""]
    for devices, (mean, summed) in enumerate(others, start=2):
        assert mean == "" and f"gives {devices} times DDP's gradients" in summed


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", [None, "zero3"])
def test_fsdp_is_predicted_and_then_measured(
    strategy: str | None, dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpsim.report.sweep.verdict.MOST_NOISE", math.inf)
    text = "train(model, shard(model))"
    if strategy:
        text = """
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        while True:
            ddp(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    script, output = a_script(tmp_path, text), tmp_path / "report"
    flags = ("--torch-script", script, "--output", output, "--budget", "1s", "--devices", "1,2")
    code, out, err = dpsim("sweep", *flags, *(("--strategy", strategy) if strategy else ()), "--json")
    assert code == 0, err
    results = read_results(output / "results.json")
    units = 4 if strategy else 3
    for point in results.points:
        several = point.setting.plan.devices > 1
        assert point.setting.runtime == FSDP and point.buckets == (units if several else 0)
        assert sum(point.bucket_bytes) == 4 * 4 * (16 * 16 + 16)
        assert all(
            (0 < exposed_s < step_s) if several else exposed_s == 0
            for exposed_s, step_s in zip(point.exposed_communication_s, point.step_s, strict=True)
        )
    assert {point["runtime"] for point in json.loads(out)["points"]} == {FSDP}
    report = (output / "report.md").read_text()
    assert "PyTorch FSDP by gloo" in report and FSDP_ON_GPUS in report
    beside = [point.setting for point in results.other_points]
    assert [(each.runtime, each.plan.strategy) for each in beside] == [("torch-ddp-gloo", "data-parallel")] * bool(
        strategy
    )
    assert ("times as many samples per second as DDP" in report) == bool(strategy)


def test_the_table_of_one_unit_prices_it_exactly() -> None:
    table = AllreduceCost(algorithm="gloo", devices=2, kind="all-gather", sizes_bytes=(4096,), time_s=(2e-3,))
    machine = Machine(name="m", allreduce=(), halves=(table,))
    curve = idle_curve(machine, msgspec.structs.replace(plan_of().collective, kind="all-gather"))
    assert np.interp(4096, *curve.points[:2]) == pytest.approx(2e-3)
