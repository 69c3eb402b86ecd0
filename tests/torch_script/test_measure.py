"""``dpsim sweep --torch-script``: a script under real DDP, predicted before; those that cannot be measured."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from interrupted import killed_once_it_exists
from report_factory import sweep
from script_profiles import four_layers

from dpsim import codec
from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.harness.load import load
from dpsim.harness.script import measure as harness
from dpsim.harness.script.experiment import completed, script_experiment
from dpsim.harness.script.places import inputs_for
from dpsim.harness.sweep.check import check
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.experiment import predict_experiment
from dpsim.harness.sweep.grids import telling
from dpsim.harness.sweep.questions import compared, group_name
from dpsim.launch import job_python
from dpsim.lowering.fusion import fuse
from dpsim.machine import Link, Machine
from dpsim.records.sweep import Experiment, read_predictions, read_results
from dpsim.setting import settings_of
from dpsim.study.environment import environment
from dpsim.study.inputs import SCHEMA as INPUTS_SCHEMA
from dpsim.study.inputs import Inputs, Prepared
from dpsim.study.task import SAMPLES_SCHEMA, Samples, samples_before
from dpsim.study.time_limit import FEWEST_ROUNDS
from dpsim.workload import Workload

Dpsim = Callable[..., tuple[int, str, str]]
PREAMBLE = """
import os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def train(steps=100_000, hook=False):
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
    ddp = DDP(model, bucket_cap_mb=25)
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        ddp.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 32)).sum().backward()
        optimizer.step()
"""


LOADER = """
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DDP(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
data = DataLoader(TensorDataset(torch.randn(4096, 32)), batch_size=4)
while True:
    for (x,) in data:
        assert len(x) in (8, 32)
        optimizer.zero_grad()
        ddp(x).sum().backward()
        optimizer.step()
"""


@pytest.fixture(autouse=True)
def _verdicts_at_any_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs as short as these are disturbed by anything, and would say that nothing can be said."""
    monkeypatch.setattr("dpsim.report.sweep.verdict.MOST_NOISE", math.inf)


CHECKPOINT = """
dist.init_process_group("gloo")
path = os.path.join(os.path.dirname(__file__), "ck.pt")
if dist.get_rank() == 0:
    torch.save("mine", path + ".new")
    os.replace(path + ".new", path)  # whole, for the processes that take turns write into one discarded folder
dist.barrier()
assert torch.load(path) == "mine"
ddp = DDP(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]))
while True:
    ddp(torch.randn(4, 32)).sum().backward()
"""


def a_script(folder: Path, text: str = "train()") -> Path:
    script = folder / "four.py"
    script.write_text(PREAMBLE + text)
    return script


def write_predictions(folder: Path, config: Experiment, machine: Machine) -> None:
    """Predictions of what is measured on one network in one way, so that the measurement begins at once."""
    experiment = completed(config, four_layers())
    prepared = Prepared.for_all(settings_of(experiment.rows), four_layers(), machine)
    folder.mkdir()
    codec.write(folder / "predictions.json", predict_experiment(experiment, prepared, environment()))


def measured(dpsim: Dpsim, script: Path, output: Path, *flags: str | Path) -> tuple[int, str, str]:
    return dpsim("sweep", "--torch-script", script, "--output", output, "--budget", "1s", *flags)


@pytest.mark.torch
def test_predictions_have_intervals_and_a_verdict_for_each_number_of_devices(dpsim: Dpsim, tmp_path: Path) -> None:
    script, output, link = a_script(tmp_path), tmp_path / "report", "paced:1.5ms,1gbit"
    config = script_experiment(
        script=str(script),
        devices=(1, 2, 4),
        communication=("mpi",),
        networks=(link,),
        caps_bytes=(0.0, 2.0**20, math.inf),
        budget_s=1.0,
    )
    machine = Machine(name="x", network=link, link=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9))
    write_predictions(output, config, machine)
    flags = ("--devices", "1,2,4", "--algorithm", "mpi", "--network", link, "--fusion-threshold", "0,1MiB,inf")
    code, out, _ = measured(dpsim, script, output, *flags, "--predict-only")
    assert code == 0 and "Note: how wide the intervals are is assumed" in out
    assert "Note: most of the interval is assumed" in out
    where = f"{link} (torch-ddp-mpi): "
    assert f"{where}1 device: 1.2 ms per step." in out
    assert f"{where}2 devices, local batch 4 (8 in all), ddp, ring: the bucket cap makes no difference" in out
    summary = json.loads(measured(dpsim, script, output, *flags, "--predict-only", "--json")[1])["summary"]
    assert [(best["where"], best["devices"]) for best in summary["best"]] == [(where[:-2], n) for n in (1, 2, 4)]
    assert all(best["speedup_low"] <= best["speedup"] <= best["speedup_high"] for best in summary["best"])


@pytest.mark.torch
def test_before_the_script_has_run_it_is_said_what_will_be_done_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two networks for MPI's hook and one for gloo."""

    def profile(*_: Any, **__: Any) -> Any:
        raise InterruptedError

    monkeypatch.setattr(harness, "profile_script", profile)
    config = script_experiment(script=str(a_script(tmp_path)), devices=(1, 2, 3), networks=("node", "paced:1ms,1gbit"))
    said: list[str] = []
    with pytest.raises(InterruptedError):
        harness.ScriptStudy(experiment=config).predict(tmp_path / "report", said.append)
    assert said[0].startswith(f"at most {3 * (2 * 7 + 1)} settings: first 10 to 20 s, 30 s at most of profiles")
    assert (
        "and calibrations on each of 3 places, each after the start of the script in every process; then DDP trains"
        in said[0]
    )
    assert "for the budget of 45 s, and 75 s at most where 6 rounds" in said[0]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ddp_is_predicted_and_then_measured_on_the_node_and_on_a_link(dpsim: Dpsim, tmp_path: Path) -> None:
    script, output = a_script(tmp_path), tmp_path / "report"
    flags = ("--fusion-threshold", "0,5KiB", "--network", "node,paced:500us,100mbit")
    flags += ("--set", "runtime=torch-ddp,dpsim")
    code, _, err = measured(dpsim, script, output, *flags, "--predict-only")
    assert code == 0, err
    for where in ("node (torch-ddp-gloo)", "node (torch-ddp-mpi)", "paced:500us,100mbit (torch-ddp-mpi)"):
        assert f"profiling and calibrating on {where}" in err
    written = (output / "predictions.json").read_bytes()
    assert not (output / "results.json").exists()
    code, out, err = measured(dpsim, script, output, *flags, "--json")
    assert code == 0, err
    assert (output / "predictions.json").read_bytes() == written
    predictions, results = read_predictions(output / "predictions.json"), read_results(output / "results.json")
    assert results.predictions_sha256 == codec.digest(predictions)
    assert results.predicted_at < results.measured_from
    runtimes = {(point.setting.network, point.setting.runtime) for point in results.points}
    assert runtimes == {
        ("node", "torch-ddp-gloo"),
        ("node", "torch-ddp-mpi"),
        ("paced:500us,100mbit", "torch-ddp-mpi"),
    }
    buckets = {0.0: 8, 5.0 * 2**10: 2}
    for point in results.points:
        plan = point.setting.plan
        assert len(point.step_s) >= 6 * FEWEST_ROUNDS
        assert set(point.logged_s) >= {"backward", "communication", "overlap"}
        assert point.buckets == buckets[plan.threshold_bytes]
        assert sum(point.bucket_bytes) == 4 * 4 * (32 * 32 + 32)
    own = {point.setting.plan.threshold_bytes: point for point in results.other_points}
    assert own  # where cores are busy, not of each cap
    for cap, point in own.items():
        assert (point.buckets, sum(point.bucket_bytes)) == (buckets[cap], 4 * 4 * (32 * 32 + 32))
    for point in own.values():
        assert (point.setting.where, point.setting.plan.devices) == ("paced:500us,100mbit (emulated computation)", 2)
        assert point.emulation is not None and len(point.step_s) >= 6 * FEWEST_ROUNDS and not point.logged_s
    for predicted in predictions.points:
        assert predicted.buckets == buckets[predicted.setting.plan.threshold_bytes]
    comparison = compare(predictions, results, blind=read_predictions(output / "blind.json"))
    assert comparison.blind_predicted_at > results.measured_from and check(output).verdict == "verified"
    assert len(comparison.groups) == 3 and all(group.noise is not None for group in comparison.groups)
    shown = json.loads(out)
    assert {point["runtime"] for point in shown["points"]} == {"torch-ddp-gloo", "torch-ddp-mpi"}
    assert "PyTorch DDP by gloo" in (output / "report.md").read_text()
    assert "dpsim's own runtime (emulated computation) took" in (output / "report.md").read_text()
    assert {"runtime", "step_s"} <= {*load(output).samples().columns}


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_grid_of_local_batches_and_caps_is_measured_with_the_batches_of_the_loaders(
    dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_script(tmp_path, LOADER)
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "report"
    flags = ("--local-batch", "32,8", "--fusion-threshold", "0,inf", "--devices", "1,2", "--algorithm", "gloo")
    code, out, err = dpsim("sweep", "--torch-script", "four", "--output", output, "--budget", "1s", *flags, "--json")
    assert code == 0, err
    points = json.loads(out)["points"]
    assert {(point["devices"], point["local_batch"]) for point in points} == {(1, 8), (1, 32), (2, 8), (2, 32)}
    assert {point["group"] for point in points} == {f"node (torch-ddp-gloo); {n}" for n in ("1 device", "2 devices")}
    for point in points:
        assert point["global_batch"] == point["devices"] * point["local_batch"]
        assert point["measured_speedup"] > 0 and point["predicted_speedup"] > 0
    measured_points = read_results(output / "results.json").points
    assert [point.buckets for point in measured_points if point.setting.plan.devices == 1] == [0] * 4
    report = (output / "report.md").read_text()
    assert "local batch" in report and "trained fastest" in report


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_micro_batches_are_predicted_and_measured_of_a_script_that_has_one(dpsim: Dpsim, tmp_path: Path) -> None:
    script, output = a_script(tmp_path, "train()"), tmp_path / "report"
    flags = ("--accumulate", "1,3", "--algorithm", "gloo")
    code, out, err = measured(dpsim, script, output, *flags, "--predict-only")
    assert code == 0 and "micro-batches" in out and "local batch 4 x 3 micro-batches (24 in all)" in out, err
    code, out, err = measured(dpsim, script, output, *flags, "--json")
    assert code == 0, err
    points = json.loads(out)["points"]
    batches = [(point["accumulate"], point["global_batch"]) for point in points]
    assert sorted(batches) == [(1, 8), (3, 24)] and len({point["group"] for point in points}) == 1
    assert {point["buckets"] for point in points} == {1}


def test_caps_that_make_the_same_buckets_are_one_setting_and_are_measured_once(tmp_path: Path) -> None:
    """The four layers have 16.5 KiB: above that every cap makes one bucket."""
    caps = (0.0, 2.0**20, math.inf)
    config = script_experiment(script=__file__, caps_bytes=caps, communication=("gloo",))
    write_predictions(
        tmp_path / "sweep", config, Machine(name="m", link=Link(latency_s=1e-3, bandwidth_bytes_per_s=1e9))
    )
    points = read_predictions(tmp_path / "sweep" / "predictions.json").points
    named = [point.names for point in points if not point.setting.repeat]
    assert named == [("ddp at 0",), ("ddp at 1 MiB", "ddp at inf")]


def test_micro_batches_are_compared_with_the_script_s_own_bucket_cap() -> None:
    config = script_experiment(script=__file__, accumulates=(1, 2, 4), communication=("gloo",))
    whole = completed(config, four_layers())
    plans = [setting.plan for setting in settings_of(whole.rows)]
    assert [(plan.accumulate, plan.global_batch, plan.threshold_bytes) for plan in plans] == [
        (count, 8 * count, 25 * 2**20) for count in (1, 2, 4)
    ]
    assert compared(whole) == ("accumulate",) and whole.question == "settings"
    (profile,) = inputs_for(whole, four_layers(), environment()).profiles
    assert profile.accumulated == ((4, 4),), "the middle one of those above 1"
    both = completed(script_experiment(script=__file__, accumulates=(1, 2), caps_bytes=(0.0, math.inf)), four_layers())
    assert {*compared(both)} == {"accumulate", "fusion_threshold_bytes"}


def test_the_script_s_own_bucket_cap_is_compared_with_others() -> None:
    config = script_experiment(script=__file__, caps_bytes=(2.0**10, None), communication=("gloo",))
    by_default = completed(config, four_layers(ddp=DdpSettings(torch="2.13.0", devices=2)))
    assert by_default.values("fusion_threshold_bytes") == (None, 2.0**10), "None: the first bucket is of 1 MiB"
    assert [setting.plan.fusion_threshold_bytes for setting in settings_of(by_default.rows)] == [None, 2.0**10]
    assert compared(by_default) == ("fusion_threshold_bytes",)
    assert completed(config, four_layers()).values("fusion_threshold_bytes") == (25 * 2.0**20, 2.0**10)


def test_a_script_that_accumulates_already_is_not_made_to() -> None:
    ddp = DdpSettings(torch="2.13.0", devices=2, accumulate=4)
    with pytest.raises(ConfigError, match="the script has 4 micro-batches a step"):
        completed(script_experiment(script=__file__, accumulates=(1, 2)), four_layers(ddp=ddp))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_measurement_goes_on_with_the_rounds_it_has(dpsim: Dpsim, tmp_path: Path) -> None:
    folder, link, script = tmp_path / "report", "paced:500us,100mbit", a_script(tmp_path)
    flags = ("--torch-script", script, "--fusion-threshold", "0,inf", "--algorithm", "mpi", "--network", link)
    command = ("sweep", *flags, "--budget", "3s", "--output", folder)
    samples = folder / "measure.samples.partial" / "1.json"
    killed_once_it_exists(samples, ("-m", "dpsim", *command))
    assert not (folder / "results.json").exists()
    before = codec.read(samples, Samples, "samples", SAMPLES_SCHEMA)
    assert before.spent_s > 0 and not before.complete and before.inputs is not None
    predicted = (folder / "predictions.json").read_bytes()

    code, _, err = dpsim(*command)
    assert code == 0 and "continuing an interrupted sweep" in err
    results = read_results(folder / "results.json")
    assert not samples.exists() and results.measured_from == before.measured_from
    assert (folder / "predictions.json").read_bytes() == predicted and check(folder).verdict == "verified"
    inputs = codec.read(folder / "inputs.json", Inputs, "inputs", INPUTS_SCHEMA)
    for rows, more in zip(before.inputs.rows, inputs.rows, strict=True):
        assert rows.subject == more.subject and 0 < more.beforehand < len(more.value)
        if more.visit:
            assert more.beforehand == rows.beforehand and list(more.visit) == sorted(more.visit)
            assert more.value[: len(rows.value)] == rows.value
        else:  # a finished study keeps the medians of the parts of steps
            assert more.value[0] == np.median(rows.early().value)
    assert {bool(rows.visit) for rows in inputs.rows} == {True, False}
    for old, new in zip(before.points, results.points, strict=True):
        kept = len(old.step_s)
        assert old.setting == new.setting and 0 < kept < len(new.step_s)
        for name in ("step_s", "exposed_communication_s", "round"):
            assert getattr(new, name)[:kept] == getattr(old, name)
        assert all(new.logged_s[name][:kept] == values for name, values in old.logged_s.items())
        assert min(new.round[kept:]) == max(old.round) + 1 and old.bucket_bytes == new.bucket_bytes


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_read_the_checkpoint_that_one_of_them_writes_and_no_file_changes(dpsim: Dpsim, tmp_path: Path) -> None:
    script, output, checkpoint = a_script(tmp_path, CHECKPOINT), tmp_path / "report", tmp_path / "ck.pt"
    checkpoint.write_text("the best so far")
    config = script_experiment(script=str(script), caps_bytes=(math.inf,), communication=("gloo",), budget_s=1.0)
    write_predictions(output, config, Machine(name="m", link=Link(latency_s=5e-4, bandwidth_bytes_per_s=1.25e7)))
    code, _, err = measured(dpsim, script, output, "--algorithm", "gloo", "--fusion-threshold", "inf")
    assert code == 0, err
    assert checkpoint.read_text() == "the best so far"
    assert {path.name for path in tmp_path.iterdir()} == {script.name, output.name, checkpoint.name}
    assert (output / "results.json").exists() and not (output / "measure.samples.partial").exists()


def test_samples_of_other_predictions_are_refused(tmp_path: Path) -> None:
    predictions, _ = sweep()
    path = tmp_path / "1.json"
    codec.write(path, msgspec.structs.replace(samples_before(path, predictions, [].append), complete=True))
    assert samples_before(path, predictions, [].append).complete
    other, _ = sweep(bias=0.2)
    with pytest.raises(ConfigError, match="measured for other predictions"):
        samples_before(path, other, [].append)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "given", "more"),
    [
        ("torch.nn.Linear(1, 1)", "without building DistributedDataParallel", "wrap the model"),
        ("train(hook=True)", "allreduce_hook", "without it"),
    ],
    ids=["no DDP", "hook of its own"],
)
def test_a_script_that_cannot_be_predicted_is_explained(
    text: str, given: str, more: str, dpsim: Dpsim, tmp_path: Path
) -> None:
    script, output = a_script(tmp_path, text), tmp_path / "report"
    code, out, err = measured(dpsim, script, output, "--algorithm", "gloo", "--fusion-threshold", "inf")
    assert (code, out) == (2, "")
    assert given in err and more in err and "Traceback" not in err
    assert not (output / "predictions.json").exists()


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "given", "more"),
    [
        (
            "if os.environ['RANK'] == '1': raise KeyError('mine')\ntrain()",
            "the script raised KeyError on rank 1",
            "without dpsim first",
        ),
        ("if os.environ['RANK'] == '1': sys.exit(7)\ntrain()", "on rank 1 with exit code 7", "without dpsim first"),
        ("train(steps=60)", "ended after", "let it train longer"),
    ],
    ids=["dies on a rank", "exits on a rank", "too short"],
)
def test_a_script_that_cannot_be_measured_is_explained(
    text: str, given: str, more: str, dpsim: Dpsim, tmp_path: Path
) -> None:
    script, output = a_script(tmp_path, text), tmp_path / "report"
    config = script_experiment(script=str(script), caps_bytes=(math.inf,), communication=("gloo",), budget_s=1.0)
    write_predictions(output, config, Machine(name="m", link=Link(latency_s=5e-4, bandwidth_bytes_per_s=1.25e7)))
    code, out, err = measured(dpsim, script, output, "--algorithm", "gloo", "--fusion-threshold", "inf")
    assert (code, out) == (2, "")
    assert given in err and more in err and "Traceback" not in err
    assert not (output / "results.json").exists()


def test_without_torch_the_message_says_what_to_install(
    dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_python, "_asked", lambda path: job_python.JobPython(path, "3.12.1", ""))
    code, out, err = measured(dpsim, a_script(tmp_path), tmp_path / "report")
    assert (code, out) == (2, "") and "PyTorch is neither installed beside dpsim nor" in err and "'.[torch]'" in err
    assert not (tmp_path / "report").exists() or not list((tmp_path / "report").glob("*.json"))


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        (("--algorithm", "gloo", "--network", "paced:50us,1gbit"), "gloo on paced:50us,1gbit"),
        (("--algorithm", "ucc"), "'ucc'"),
        (("--algorithm", "nccl,gloo"), "one script on GPUs and on processors"),
        (("--algorithm", "nccl", "--network", "paced:50us,1gbit"), "nccl on paced:50us,1gbit"),
        (("--devices", "1"), "DDP on devices 1"),
        (("--fusion-threshold", "1MiB,1MiB"), "caps_bytes"),
        (("--local-batch", "16"), "--local-batch 16, with which there is nothing to compare"),
        (("--local-batch", "8,8"), "local_batches"),
        (("--accumulate", "2"), "--accumulate 2, with which there is nothing to compare"),
        (("--accumulate", "1,1"), "accumulates"),
        (("--set", "runtime=dpsim", "--network", "paced:1ms,100mbit"), "without DDP itself"),
        (("--set", "runtime=torch-ddp,dpsim"), "--set runtime=dpsim with gloo and mpi on node"),
        (("--set", "runtime=torch-ddp,horovod"), "'horovod'"),
        (("--local-batch", "8,0"), "--local-batch is '0'"),
        (("--workload", "nowhere.json"), "nowhere.json"),
    ],
)
def test_flags_that_make_no_measurement_are_refused(
    flags: tuple[str, ...], given: str, dpsim: Dpsim, tmp_path: Path
) -> None:
    code, out, err = measured(dpsim, a_script(tmp_path), tmp_path / "report", *flags)
    assert (code, out) == (2, "") and given in err
    assert not (tmp_path / "report").exists()


@pytest.mark.torch
def test_more_processes_than_fit_into_memory_are_refused(dpsim: Dpsim, tmp_path: Path) -> None:
    code, out, err = measured(dpsim, a_script(tmp_path), tmp_path / "report", "--devices", "100000")
    assert (code, out) == (2, "") and "in 100000 processes on this machine" in err and "memory that is free" in err
    assert not (tmp_path / "report" / "predictions.json").exists()


def test_a_script_and_its_flag_are_needed(dpsim: Dpsim, tmp_path: Path) -> None:
    assert dpsim("sweep", "--workload", "w.json")[0] == 2
    code, _, err = measured(dpsim, tmp_path / "nowhere.py", tmp_path / "report")
    assert code == 2 and "there is no such file" in err


def test_caps_are_those_that_give_different_buckets() -> None:
    workload = four_layers()
    caps, order = telling(workload, "ddp", 2.0**10, 7), workload.ready_order
    counts = [len(fuse(order.size_bytes, "ddp", cap)) - 1 for cap in caps]
    assert counts[0] == 8 and counts[-1] == 1 and len(set(counts)) == len(counts)
    assert list(caps) == sorted(caps)


def test_the_grid_has_every_way_to_communicate_on_the_networks_that_have_it(tmp_path: Path) -> None:
    config = script_experiment(
        script=str(a_script(tmp_path)), caps_bytes=(0.0, 1e6), networks=("node", "paced:1ms,100mbit"), arguments=("-x",)
    )
    experiment = completed(config, four_layers())
    assert (experiment.values("local_batch"), experiment.arguments) == ((4,), ("-x",))
    assert [(case["runtime"], case["network"], case["overlap"]) for case in experiment.cases] == [
        ("torch-ddp-gloo", "node", "thread"),
        ("torch-ddp-mpi", "node", "inline"),
        ("torch-ddp-mpi", "paced:1ms,100mbit", "thread"),
    ]


@pytest.mark.parametrize(
    ("workload", "given"),
    [
        (four_layers(ddp=None), "not recorded from a PyTorch script"),
        (four_layers(ddp=DdpSettings(torch="2.13.0", devices=2, communication_hook="fp16")), "hook fp16"),
        (four_layers(ddp=DdpSettings(torch="2.13.0", devices=2, bucket_caps_bytes=(5,))), "bucket_cap_mb_list"),
        (
            four_layers(ddp=DdpSettings(torch="2.13.0", devices=2, find_unused_parameters=True)),
            "find_unused_parameters",
        ),
    ],
)
def test_a_workload_that_the_rule_does_not_predict_is_refused(workload: Workload, given: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=given):
        completed(script_experiment(script=str(a_script(tmp_path))), workload)


BATCHES = (8, 16, 32)


def profiled_at(batches: tuple[int, ...], cap: int | None = None) -> Workload:
    """A workload as a profile at several local batches has it, of a script that sets ``bucket_cap_mb`` or does not."""
    one = four_layers()
    layers = tuple(
        msgspec.structs.replace(layer, forward_s=(1e-4,) * len(batches), backward_s=(2e-4,) * len(batches))
        for layer in one.layers
    )
    ddp = DdpSettings(torch="2.13.0", devices=2, bucket_cap_bytes=cap)
    return msgspec.structs.replace(one, local_batches=batches, layers=layers, ddp=ddp)


@pytest.mark.parametrize("cap", [None, 4096])
def test_local_batches_alone_are_swept_with_the_cap_of_the_script(cap: int | None, tmp_path: Path) -> None:
    config = script_experiment(script=str(a_script(tmp_path)), local_batches=(32, 8, 16), devices=(2, 1))
    experiment = completed(config, profiled_at(BATCHES, cap))
    assert (experiment.question, experiment.weak) == ("local-batch", True)
    assert (experiment.values("local_batch"), experiment.values("devices")) == (BATCHES, (1, 2))
    plans = [setting.plan for setting in settings_of(experiment.rows)]
    assert {plan.fusion_threshold_bytes for plan in plans} == {cap}, "none: DDP's default, with a small first bucket"
    assert {plan.global_batch for plan in plans if plan.devices == 2} == {16, 32, 64}


def test_local_batches_and_caps_are_compared_with_each_other_on_each_place_and_number_of_devices(
    tmp_path: Path,
) -> None:
    networks = ("node", "paced:1ms,100mbit")
    config = script_experiment(
        script=str(a_script(tmp_path)), local_batches=BATCHES, caps_bytes=(0.0, 1e6), devices=(1, 2), networks=networks
    )
    experiment = completed(config, profiled_at(BATCHES))
    assert experiment.question == "settings" and {*compared(experiment)} == {"local_batch", "fusion_threshold_bytes"}
    groups = Counter(group_name(experiment, setting) for setting in settings_of(experiment.rows))
    assert groups == {
        f"{where}; {devices}": 6
        for where in ("node (torch-ddp-gloo)", "node (torch-ddp-mpi)", "paced:1ms,100mbit (torch-ddp-mpi)")
        for devices in ("1 device", "2 devices")
    }


@pytest.mark.parametrize(
    ("local_batches", "workload", "given"),
    [
        ((8, 64), profiled_at(BATCHES), "--local-batch 8,64, where the workload was profiled at 8,16,32"),
        ((), profiled_at(BATCHES), "profiled at local batches 8,16,32"),
    ],
)
def test_local_batches_that_were_not_profiled_are_refused(
    local_batches: tuple[int, ...], workload: Workload, given: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=given):
        completed(script_experiment(script=str(a_script(tmp_path)), local_batches=local_batches), workload)
