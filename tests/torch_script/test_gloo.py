"""``dpsim calibrate --algorithm gloo``: a machine file of what PyTorch takes on processors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dpsim import machine as machines
from dpsim.ddp_settings import DdpSettings, ShardedUnit
from dpsim.machine import AllreduceCost, Machine
from dpsim.model.cautions import cautions
from dpsim.model.points import plan_one
from dpsim.plan import Plan
from dpsim.setting import Grid
from dpsim.workload import Layer, Tensor, Workload

Dpsim = Callable[..., tuple[int, str, str]]
WORKLOAD = Workload(
    name="two",
    local_batches=(8,),
    layers=(Layer(name="a", forward_s=(1e-3,), backward_s=(2e-3,), tensors=(Tensor(name="w", shape=(64, 64)),)),),
    ddp=DdpSettings(torch="2.13.0", devices=2),
)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gloo_is_calibrated_and_prices_a_script(dpsim: Dpsim, tmp_path: Path) -> None:
    file = tmp_path / "gloo.json"
    code, out, err = dpsim("calibrate", "--algorithm", "gloo", "--devices", "2", "--budget", "2s", "--output", file)
    assert code == 0, err
    machine = read(file)
    (table,) = machine.allreduce
    assert (table.algorithm, table.devices, machine.network) == ("gloo", 2, "node") and "gloo on 2" in out
    assert table.sizes_bytes[-1] > 2**24 and machine.relative_uncertainty and machine.cores
    workload = tmp_path / "w.json"
    workload.write_bytes(msgspec.json.encode(WORKLOAD))
    code, out, _ = dpsim("predict", "--workload", workload, "--machine", file, "--devices", "2")
    assert code == 0 and ", gloo" in out and "communicates by gloo" not in out


def test_fsdp_on_processors_waits_for_each_collective() -> None:
    unit = ShardedUnit(name="a", size_bytes=64 * 64 * 4, reshard=True)
    sharded = msgspec.structs.replace(WORKLOAD, ddp=DdpSettings(torch="2.13.0", devices=2, units=(unit,)))
    table = AllreduceCost(algorithm="gloo", devices=2, sizes_bytes=(4, 2**20), time_s=(1e-3, 2e-3))
    gloo = Machine(name="m", allreduce=(table,), cores=2, relative_uncertainty=0.05)
    grid = Grid.of(devices=2, local_batch=8)
    assert plan_one(sharded, gloo, grid)[0].overlap == "off"
    assert plan_one(sharded, gloo, grid.changed(overlap="thread"))[0].overlap == "thread"


def read(file: Path) -> Machine:
    return machines.read(file)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--network paced:50us,1gbit", "2 ranks or more on this machine"),
        ("--devices 1", "2 ranks or more on this machine"),
        ("--devices 2x2", "2 ranks or more on this machine"),
        ("--model mlp", "--model: with --algorithm gloo"),
    ],
)
def test_what_gloo_cannot_is_one_message(flags: str, said: str, dpsim: Dpsim, tmp_path: Path) -> None:
    output = tmp_path / "gloo.json"
    code, out, err = dpsim("calibrate", "--algorithm", "gloo", "--output", output, *flags.split())
    assert code == 2 and not out and said in err and "Traceback" not in err and not output.exists()


@pytest.mark.parametrize(("algorithm", "warned"), [("auto", True), ("gloo", False), ("mpi", False)])
def test_a_script_that_is_priced_by_allreduces_of_dpsim_is_said(algorithm: str, warned: bool) -> None:
    table = AllreduceCost(algorithm=algorithm, devices=2, sizes_bytes=(4, 4096), time_s=(1e-5, 2e-5))
    machine = Machine(name="m", allreduce=(table,), cores=2, relative_uncertainty=0.05)
    plan = Plan(devices=2, global_batch=16, algorithm=algorithm, fusion_rule="ddp")
    said = [each for each in cautions(machine, [plan], WORKLOAD) if "communicates by gloo" in each]
    assert bool(said) == warned
