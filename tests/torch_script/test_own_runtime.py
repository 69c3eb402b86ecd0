"""dpsim's own runtime beside DDP: the same plans on the same link, with ranks that wait for the profiled times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from report_factory import PACED, sweep

from dpsim import codec
from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.harness.script.experiment import completed, script_experiment
from dpsim.harness.script.own_runtime import OWN_RUNTIME, check_emulation, other_settings
from dpsim.harness.sweep.compare import compare
from dpsim.lowering import lower
from dpsim.machine import ComputeSlowdown, Link, Machine
from dpsim.plan import Plan
from dpsim.report.sweep.content import answers, tables
from dpsim.runtime.emulated import WorkloadReplica
from dpsim.setting import Setting, setting_of, settings_of
from dpsim.study.emulation import emulated_workload
from dpsim.study.task import SAMPLES_SCHEMA, Samples, ScriptTask, samples_before
from dpsim.workload import Layer, Tensor, Workload

LAYERS = 4


def workload(dtype: str = "float32", **changes: Any) -> Workload:
    layers = tuple(
        Layer(
            name=f"{number}",
            kind="module",
            forward_s=(2e-3,),
            backward_s=(4e-3,),
            tensors=(Tensor(name=f"{number}.weight", shape=(32, 32), dtype=dtype),),
        )
        for number in range(LAYERS)
    )
    ddp = DdpSettings(torch="2.13.0", devices=2)
    whole = Workload(name="four", local_batches=(4,), layers=layers, ddp=ddp, update_s=1e-3, overhead_s=1e-3)
    return msgspec.structs.replace(whole, **changes)


def machine(**changes: Any) -> Machine:
    link = Link(latency_s=5e-5, bandwidth_bytes_per_s=1.25e8)
    return Machine(name="m", network=PACED, emulated_network=True, link=link, **changes)


def settings(folder: Path, devices: tuple[int, ...] = (1, 2)) -> tuple[Setting, ...]:
    script = folder / "four.py"
    script.touch()
    config = script_experiment(
        script=str(script),
        devices=devices,
        caps_bytes=(0.0, 8192.0, float("inf")),
        networks=("node", PACED),
        runtimes=("torch-ddp", "dpsim"),
    )
    experiment = completed(config, workload())
    assert experiment.other_runtimes == ("dpsim",)
    return settings_of(experiment.rows)


def test_it_trains_where_it_can_do_what_ddp_does(tmp_path: Path) -> None:
    of_ddp = settings(tmp_path)
    own = other_settings(of_ddp, [OWN_RUNTIME])
    assert {(each.network, each.plan.devices, each.where) for each in own} == {
        (PACED, 2, f"{PACED} (emulated computation)")
    }
    on_link = [each for each in of_ddp if each.network == PACED and each.plan.devices == 2]
    assert [each.plan for each in own] == [each.plan for each in on_link] and len(own) == 3


def test_ranks_wait_as_long_as_so_many_devices_compute_at_once() -> None:
    of_ddp = Setting(plan=_plan(), model="four.py", network=PACED, runtime="torch-ddp-mpi")
    plan = other_settings([of_ddp], [OWN_RUNTIME])[0].plan
    slow = machine(compute_slowdown=(ComputeSlowdown(devices=2, factor=1.5, added_s=2e-3),))
    waited = emulated_workload(workload(input_s_per_sample=1e-4), slow, plan)
    times = waited.times(4)
    np.testing.assert_allclose(times.forward_s, 3e-3)
    np.testing.assert_allclose(times.backward_s, 6e-3)
    assert (waited.update_s, times.overhead_s) == pytest.approx((1.5e-3, 1.5e-3 + 2e-3 + 4e-4))
    assert waited.emulated_compute and waited.input_s_per_sample == 0


def _plan(devices: int = 2, threshold: float = 8192.0) -> Plan:
    row = {"devices": devices, "local_batch": 4, "fusion_rule": "ddp", "fusion_threshold_bytes": threshold}
    return setting_of(row | {"network": PACED, "algorithm": "ring", "overlap": "thread"}).plan


@pytest.mark.parametrize(
    ("of", "given"),
    [
        (workload("bfloat16"), "gradients of bfloat16"),
        (workload(input_prefetch=True, input_s_per_sample=1e-4), "data loader has worker processes"),
    ],
)
def test_what_ranks_cannot_wait_for_is_refused(of: Workload, given: str) -> None:
    with pytest.raises(ConfigError, match=given):
        check_emulation(of)


def test_a_replica_of_a_workload_has_its_tensors() -> None:
    replica = WorkloadReplica(workload())
    assert {name: value.shape for name, value in replica.initial_parameters(0).items()} == {
        f"{number}.weight": (32, 32) for number in range(LAYERS)
    }
    assert lower(workload(), _plan()).buckets == LAYERS // 2


@pytest.mark.torch
@pytest.mark.parametrize(("devices", "runs"), [(2, 1), (3, 1), (4, 2)])  # eight do not start at once
def test_its_steps_last_as_long_as_what_is_waited_for_and_send_the_same_buckets(
    devices: int, runs: int, on_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    setting = Setting(plan=_plan(devices), model="four", network=PACED, runtime="dpsim", compute="emulated")
    before = samples_before(tmp_path / "samples.json", sweep()[0], [].append)
    task = ScriptTask(
        experiment=msgspec.structs.replace(before.experiment, budget_s=0.0, interval=1.0, seed=0),
        inputs=None,
        place=0,
        settings=tuple(msgspec.structs.replace(setting, repeat=run) for run in range(runs)),
        meeting=str(tmp_path),
        before=before,
        save_to=str(tmp_path / "samples.json"),
        workload=workload(),
        machine=machine(),
    )
    result = on_ranks("dpsim.study.runners.mpi_ranks:script_on_ranks", codec.to_builtins(task), devices=task.ranks)
    samples = codec.decode(result, Samples, "samples")
    assert samples == codec.read(tmp_path / "samples.json", Samples, "samples", SAMPLES_SCHEMA)
    assert len(samples.points) == runs
    point = samples.points[0]
    assert (point.buckets, point.bucket_bytes) == (2, (2 * 4 * 32 * 32,) * 2) and not point.logged_s
    assert len(point.step_s) == len(point.exposed_communication_s) == 6 * 6
    assert np.median(point.step_s) >= 0.95 * (LAYERS * 6e-3 + 2e-3) and point.emulation is not None


def test_the_report_shows_it_beside_ddp_where_it_was_measured() -> None:
    predictions, results = sweep(overlaps=("thread",))
    of_link = [point for point in results.points if point.setting.network == PACED and point.setting.plan.devices == 2]
    others = tuple(
        msgspec.structs.replace(
            point,
            setting=msgspec.structs.replace(point.setting, compute="emulated"),
            step_s=tuple(2 * step_s for step_s in point.step_s),
        )
        for point in of_link
        if not point.setting.repeat
    )
    comparison = compare(predictions, msgspec.structs.replace(results, other_points=others))
    for point in comparison.points:
        measured_there = point.network == PACED and point.devices == 2
        assert (point.dpsim_step_s is not None) == measured_there
    sentences = [
        sentence for sentence in answers(comparison) if "dpsim's own runtime (emulated computation)" in sentence
    ]
    assert len(sentences) == 1 and "took 2.0" in sentences[0]
    heads = [column.head for column in tables(comparison)[0].columns]
    assert "dpsim's runtime (emulated computation) ms" in heads
    assert not any("dpsim" in column.head for column in tables(compare(predictions, results))[0].columns)
