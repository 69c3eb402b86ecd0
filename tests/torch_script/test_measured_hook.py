"""``sweep --algorithm gloo,hook`` of a script: DDP with dpsim's hook in turns with gloo, and what it gains."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from report_factory import sweep
from script_profiles import four_layers

from dpsim import codec
from dpsim.constraints import HOOK
from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.harness.script.experiment import completed, script_experiment
from dpsim.harness.script.own_runtime import other_settings
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.experiment import predict_experiment
from dpsim.machine import Link, Machine
from dpsim.plan import Plan
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison
from dpsim.records.sweep import read_results
from dpsim.report.sweep.content import answers, tables
from dpsim.setting import Setting, settings_of
from dpsim.study.environment import environment
from dpsim.study.inputs import Prepared
from dpsim.study.runners.script import HOOK_SETTLES
from dpsim.study.time_limit import FEWEST_ROUNDS

Dpsim = Callable[..., tuple[int, str, str]]
SCRIPT = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for step in range(100_000):
    optimizer.zero_grad()
    ddp(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    if step == 5:
        hook = ddp._get_ddp_logging_data().get("comm_hook", "none")
        print("hook of rank", "AB"[dist.get_rank()], hook, file=sys.stderr)
"""


def test_the_hook_is_measured_on_several_devices_with_the_plan_of_gloo() -> None:
    communication = ("gloo", "mpi", "hook")
    config = script_experiment(script=__file__, communication=communication, devices=(1, 2), networks=("node",))
    experiment = completed(config, four_layers())
    settings = settings_of(experiment.rows)
    assert {setting.plan.threshold_bytes for setting in settings} == {25 * 2**20}, "the script's own cap alone"
    (hook,) = other_settings(settings, experiment.other_runtimes)
    (gloo,) = (each for each in settings if each.runtime == "torch-ddp-gloo" and each.plan.devices == 2)
    assert hook == msgspec.structs.replace(gloo, runtime=HOOK) and hook.where == "node (torch-ddp-hook)"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"communication": ("hook",)}, "hook without gloo on node"),
        ({"communication": ("mpi", "hook")}, "hook without gloo on node"),
        (
            {"communication": ("gloo", "mpi", "hook"), "networks": ("paced:1ms,100mbit",)},
            "on paced:1ms,100mbit: dpsim's hook without gloo on node",
        ),
        ({"communication": ("gloo", "nccl", "hook")}, "one script on GPUs and on processors"),
        ({"communication": ("gloo", "hook"), "strategy": "zero3"}, "--algorithm hook where FSDP trains"),
    ],
)
def test_where_the_hook_cannot_be_compared_with_gloo_it_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        script_experiment(script=__file__, **given)


def test_a_script_with_a_hook_of_its_own_is_refused() -> None:
    config = script_experiment(script=__file__, communication=("gloo", "hook"))
    with pytest.raises(ConfigError, match="registers the communication hook fp16"):
        completed(config, four_layers(ddp=DdpSettings(torch="2.13.0", devices=2, communication_hook="fp16")))


def with_hook(times: float) -> Comparison:
    """A comparison in which the hook's steps take so many times as long as those of gloo."""
    comparison = compare(*sweep(networks=("node",), devices=(1, 2), overlaps=("thread",)))
    plan = Plan(devices=2, global_batch=64, fusion_rule="ddp", algorithm="gloo", overlap="thread")
    setting = Setting(plan=plan, model="four.py", runtime=HOOK)

    def measured(point: ComparedPoint) -> ComparedPoint:
        step_s = tuple(times * step_s for step_s in point.runs[0].step_s)
        run = msgspec.structs.replace(point.runs[0], setting=setting, step_s=step_s)
        return point.replaced(other_run=run, other_half_width=0.2) if point.devices == 2 else point

    return msgspec.structs.replace(comparison, points=tuple(map(measured, comparison.points)))


@pytest.mark.parametrize(("times", "said"), [(0.5, "add the line"), (0.95, "no gain beyond the noise")])
def test_the_report_ends_with_the_gain_beside_the_noise_and_the_line_to_paste(times: float, said: str) -> None:
    comparison = with_hook(times)
    last = answers(comparison)[-1]
    assert last.startswith("With dpsim's hook 2 devices train ") and "(noise 20.0%)" in last and said in last
    assert "not predicted" in last and "model.register_comm_hook(None, dpsim.torch.allreduce_hook())" in last
    best = min((each for each in comparison.points if each.hook_step_s), key=lambda each: each.measured_step_s)
    assert f"train {best.measured_step_s / (best.hook_step_s or 0):.2f} times" in last
    assert best.hook_step_s == pytest.approx(times * best.measured_step_s, rel=0.05) and best.dpsim_step_s is None
    assert "hook ms" in [column.head for column in tables(comparison)[0].columns]


@pytest.mark.torch
def test_the_hook_has_found_its_way_before_anything_counts() -> None:
    from dpsim.torch import hook

    assert hook._SETTLING_STEPS + 3 * hook._TURNS * hook._STEPS_A_TURN < HOOK_SETTLES


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_an_unchanged_script_trains_by_gloo_and_by_the_hook_in_turns(
    dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpsim.report.sweep.tables.MOST_NOISE", math.inf)  # so short a run is disturbed by anything
    script, folder = tmp_path / "four.py", tmp_path / "report"
    script.write_text(SCRIPT)
    experiment = completed(
        script_experiment(str(script), communication=("gloo", "hook"), budget_s=1.0, seed=0), four_layers()
    )
    machine = Machine(name="m", link=Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9))
    prepared = Prepared.for_all(settings_of(experiment.rows), four_layers(), machine)
    folder.mkdir()
    codec.write(folder / "predictions.json", predict_experiment(experiment, prepared, environment()))
    flags = ("--algorithm", "gloo,hook", "--budget", "1s", "--output", folder, "--json")
    code, out, err = dpsim("sweep", "--torch-script", script, *flags)
    assert code == 0, err
    assert all(f"hook of rank {rank} dpsim_allreduce_hook" in err for rank in "AB"), err
    assert "cannot share memory" not in err
    results = read_results(folder / "results.json")
    assert {point.setting.runtime for point in results.points} == {"torch-ddp-gloo"}
    (hook,) = results.other_points
    assert hook.setting.runtime == HOOK and len(hook.step_s) >= 6 * FEWEST_ROUNDS
    assert hook.buckets == results.points[0].buckets
    (point,) = json.loads(out)["points"]
    assert point["hook_step_s"] > 0 and point["hook_noise"] > 0 and point["dpsim_step_s"] is None
    assert "With dpsim's hook 2 devices train" in (folder / "report.md").read_text()
