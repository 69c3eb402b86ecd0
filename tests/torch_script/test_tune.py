"""``dpsim tune`` of a script: its batches, what is measured beside the default, and scripts that cannot be tuned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from dpsim.ddp_settings import DdpSettings
from dpsim.errors import ConfigError
from dpsim.harness.script import tune as harness
from dpsim.harness.script.experiment import completed, script_experiment
from dpsim.harness.script.measure import ScriptStudy
from dpsim.plan import Plan
from dpsim.records.sweep import Experiment
from dpsim.setting import setting_of, settings_of
from dpsim.study.task import ScriptTask
from dpsim.torch.script.probe.endings import ENDED_EARLY
from dpsim.torch.script.recorded import joined
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


def profiling(most: int) -> Callable[..., Workload]:
    """Profiles of a script with a batch of 4 that can be given batches up to ``most``."""

    def profile_script(request: ScriptRequest, local_batches: Sequence[int] = (4,)) -> Workload:
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


def test_what_is_measured_are_the_given_pairs_of_cap_and_batch(declared: Experiment) -> None:
    (case,) = declared.cases
    pairs = [{"local_batch": 4}, {"local_batch": 4, "fusion_threshold_bytes": 4096.0}, {"local_batch": 16}]
    cases = tuple(case | pair for pair in pairs)
    experiment = completed(msgspec.structs.replace(declared, cases=cases), joined([workload(4), workload(16)]))
    plans = [setting.plan for setting in settings_of(experiment.rows)]
    assert [(plan.local_batch, plan.fusion_threshold_bytes) for plan in plans] == [(4, None), (4, 4096.0), (16, None)]
    assert experiment.compared == ("fusion_threshold_bytes", "local_batch")
    task = ScriptTask(experiment=experiment, inputs=None, place=0, meeting="")
    assert task.sets_local_batch and task.request(16).local_batch == 16


def plans(*accumulates: int) -> list[Plan]:
    row = {"devices": 2, "local_batch": 4, "fusion_rule": "ddp", "algorithm": "gloo", "overlap": "thread"}
    return [setting_of(row | {"runtime": "torch-ddp-gloo", "accumulate": count}).plan for count in accumulates]


def test_the_best_accumulation_is_measured_beside_the_default(
    declared: Experiment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Experiment] = []

    def run(study: ScriptStudy, *_: object) -> SimpleNamespace:
        asked.append(completed(study.experiment, workload(4)))
        return SimpleNamespace(comparison=None)

    monkeypatch.setattr(ScriptStudy, "run", run)
    known = harness.Profiled(workload=workload(4), batches=(4,), refusal=None)
    harness.measure_advised(ScriptStudy(experiment=declared), known, plans(1, 8), tmp_path, print)
    measured = [setting.plan for setting in settings_of(asked[0].rows)]
    assert [(plan.accumulate, plan.global_batch) for plan in measured] == [(1, 8), (8, 64)]
    assert "accumulate" in asked[0].compared and "accumulate" not in asked[0].base
    task = ScriptTask(experiment=asked[0], inputs=None, place=0, meeting="")
    assert task.sets_accumulation and not task.sets_local_batch


def test_a_script_that_is_too_short_to_accumulate_is_measured_without(
    declared: Experiment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders, lines = [], list[str]()

    def run(study: ScriptStudy, folder: Path, progress: object) -> SimpleNamespace:
        folders.append(folder)
        if study.experiment.values("accumulate"):
            raise ConfigError(f"{ENDED_EARLY} 3 rounds of 8 training steps")
        return SimpleNamespace(comparison=len(study.experiment.rows))

    monkeypatch.setattr(ScriptStudy, "run", run)
    known = harness.Profiled(workload=workload(4), batches=(4,), refusal=None)
    default, accumulating = plans(1, 8)
    capped = msgspec.structs.replace(default, fusion_threshold_bytes=4096.0)
    given = [default, capped, accumulating]
    found: object = harness.measure_advised(ScriptStudy(experiment=declared), known, given, tmp_path, lines.append)
    assert found == 2 and folders == [tmp_path / "measured", tmp_path / "without-accumulation" / "measured"]
    assert lines == ["warning: accumulation is not measured, since the script ended after 3 rounds of 8 training steps"]
    with pytest.raises(ConfigError, match="3 rounds"):
        harness.measure_advised(ScriptStudy(experiment=declared), known, [default, accumulating], tmp_path, print)


@pytest.mark.torch
def test_a_script_that_cannot_accumulate_is_tuned_and_the_reason_kept(declared: Experiment) -> None:
    script = Path(declared.script)
    script.write_text(SCRIPT.replace("        optimizer.step()", "        optimizer.step(lambda: None)"))
    found = harness.profiled(ScriptStudy(experiment=declared), (4,), print, accumulates=True)
    assert found.workload.local_batches == (4,)
    assert found.cannot_accumulate.startswith("gives the optimizer's step a closure")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_script_is_tuned(dpsim: Dpsim, declared: Experiment, tmp_path: Path) -> None:
    flags = ("--devices", "2", "--local-batch", "16", "--output", tmp_path / "tuned")
    code, out, err = dpsim("tune", "--torch-script", declared.script, *flags)
    assert code == 0, err
    assert "default: bucket cap 25 MiB, local batch 4" in out and "local batch 16" in out


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
