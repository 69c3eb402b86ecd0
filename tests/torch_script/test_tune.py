"""``dpsim tune`` of a script: its batches, the line that measures its advice, and scripts that cannot be tuned."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.harness.script import tune as harness
from dpsim.harness.script.experiment import completed, script_experiment
from dpsim.harness.script.measure import ScriptStudy
from dpsim.launch import job_python
from dpsim.machine import Link, Machine
from dpsim.records.sweep import Experiment
from dpsim.setting import settings_of
from dpsim.torch.script.probe.endings import WITH_ACCUMULATE
from dpsim.torch.script.request import ScriptRequest
from dpsim.workload import Layer, Tensor, Workload

Dpsim = Callable[..., tuple[int, str, str]]
SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
data = DataLoader(TensorDataset(torch.randn(4096, 32)), batch_size=4)
while True:
    for (x,) in data:
        optimizer.zero_grad()
        ddp(x).sum().backward()
        optimizer.step()
"""


def workload(batch: int) -> Workload:
    layers = tuple(
        Layer(
            name=f"{number}",
            kind="module",
            forward_s=(1e-4 * batch,),
            backward_s=(2e-4 * batch,),
            tensors=(Tensor(name=f"{number}.weight", shape=(32, 32)),),
        )
        for number in range(4)
    )
    return Workload(name="four", local_batches=(batch,), layers=layers, ddp=DdpSettings(torch="2.13.0", devices=2))


@pytest.fixture
def declared(tmp_path: Path) -> Experiment:
    (tmp_path / "four.py").write_text(SCRIPT)
    return script_experiment(str(tmp_path / "four.py"), communication=("gloo",), budget_s=1.0)


def profiling(most: int, cannot_accumulate: str = "") -> Callable[..., Workload]:
    """Profiles of a script with a batch of 4 that can be given batches up to ``most``."""

    def profile_script(request: ScriptRequest, local_batches: Sequence[int] = (4,), **_: object) -> Workload:
        if request.accumulates and cannot_accumulate:
            raise ConfigError(WITH_ACCUMULATE + cannot_accumulate)
        if max(local_batches) > most:
            raise ConfigError(f"--local-batch {max(local_batches)} is more than the data")
        return workload(max(local_batches))

    return profile_script


@pytest.mark.parametrize(
    ("most", "asked", "batches", "refused"),
    [(64, (), (4, 8, 16), False), (8, (), (4, 8), True), (4, (), (4,), True), (64, (2, 4, 32), (4, 2, 32), False)],
)
def test_a_script_is_profiled_at_its_own_batch_and_at_larger_ones_as_far_as_it_can(
    most: int,
    asked: tuple[int, ...],
    batches: tuple[int, ...],
    refused: bool,
    declared: Experiment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "profile_script", profiling(most))
    found = harness.profiled(ScriptStudy(experiment=declared), asked, print)
    assert found.batches == batches and found.workload.local_batches == tuple(sorted(batches))
    assert (found.refusal is not None) == refused


def test_a_batch_that_was_asked_for_is_not_left_out_silently(
    declared: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "profile_script", profiling(8))
    with pytest.raises(ConfigError, match="more than the data"):
        harness.profiled(ScriptStudy(experiment=declared), (16,), print)


def planned(study: ScriptStudy, experiment: Experiment) -> SimpleNamespace:
    """Predictions of a study's settings: its workload, a slow link, and the settings."""
    assert study.seen is not None
    points = [SimpleNamespace(setting=setting) for setting in settings_of(completed(experiment, study.seen).rows)]
    machine = Machine(name="m", link=Link(latency_s=1e-3, bandwidth_bytes_per_s=1e8))
    return SimpleNamespace(workloads=(study.seen,), machines=(machine,), points=points)


@pytest.mark.parametrize(
    ("most", "fields", "cannot"),
    [
        (64, {"local_batch": (4, 16)}, ""),
        (4, {"accumulate": (1, 8)}, ""),
        (4, {}, "gives the optimizer's step a closure"),
    ],
    ids=["batch", "accumulation", "cap alone"],
)
def test_the_line_that_is_printed_measures_the_fastest_and_the_default(
    most: int,
    fields: dict[str, tuple[int, ...]],
    cannot: str,
    dpsim: Dpsim,
    declared: Experiment,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def predict(study: ScriptStudy, *_: object) -> SimpleNamespace:
        if study.seen is None:
            studied.append(study.experiment)
            raise ConfigError("studied")
        return planned(study, study.experiment)

    studied = list[Experiment]()
    monkeypatch.setattr(harness, "profile_script", profiling(most, cannot))
    monkeypatch.setattr(ScriptStudy, "predict", predict)
    monkeypatch.setattr(job_python, "job_python", lambda *_: job_python.OWN)
    flags = ("--torch-script", declared.script, "--devices", "2", "--output", tmp_path / "tuned")
    code, out, err = dpsim("tune", *flags, "--", "--name", "two words")
    assert code == 0, err
    assert ("Note: accumulation is predicted, and cannot be measured" in out) == bool(cannot)
    *_, title, line = out.splitlines()
    assert title == "To measure the fastest and the default in turns:" and line.endswith(" -- --name 'two words'")
    name, *words = shlex.split(line)
    end = words.index("--")
    _, _, err = dpsim(*words[:end], "--predict-only", *words[end:])
    assert name == "dpsim" and "studied" in err
    (experiment,) = studied
    assert experiment.script == declared.script and experiment.arguments == ("--name", "two words")
    assert experiment.values("devices") == (2,) and experiment.values("runtime") == ("torch-ddp-gloo",)
    assert {
        name: experiment.values(name) for name in ("local_batch", "accumulate") if experiment.values(name)
    } == fields
    default, cap = experiment.values("fusion_threshold_bytes")
    assert default is None and 0 <= cap < 25 * 2**20


@pytest.mark.torch
def test_a_script_that_cannot_accumulate_is_tuned_and_the_reason_kept(declared: Experiment) -> None:
    script = Path(declared.script)
    script.write_text(SCRIPT.replace("        optimizer.step()", "        optimizer.step(lambda: None)"))
    found = harness.profiled(ScriptStudy(experiment=declared), (4,), print)
    assert found.workload.local_batches == (4,)
    assert found.cannot_accumulate.startswith("gives the optimizer's step a closure")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_is_tuned_and_the_printed_line_runs(dpsim: Dpsim, declared: Experiment, tmp_path: Path) -> None:
    flags = ("--devices", "2", "--local-batch", "16", "--output", tmp_path / "tuned")
    code, out, err = dpsim("tune", "--torch-script", declared.script, *flags)
    assert code == 0, err
    assert "default: bucket cap 25 MiB, local batch 4" in out and "local batch 16" in out
    words = shlex.split(out.splitlines()[-1])
    code, out, err = dpsim(*words[1:], "--budget", "1s", "--output", tmp_path / "swept")
    assert code == 0, err
    assert f"report: {tmp_path / 'swept' / 'index.html'}" in out and (tmp_path / "swept" / "results.json").exists()


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('nothing to train')", "ended without building DistributedDataParallel"),
        (SCRIPT.replace("while True", "for _ in range(0)"), "ended"),
    ],
    ids=["without DDP", "ends early"],
)
def test_a_script_that_cannot_be_tuned_is_explained(text: str, said: str, dpsim: Dpsim, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(text)
    code, out, err = dpsim("tune", "--torch-script", tmp_path / "bad.py", "--devices", "2")
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
