"""dpsim enters the environment of a job, which has PyTorch and need not have anything that dpsim needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import environments
import pytest
from published_files import MACHINE

from dpsim import workload as workloads

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
Dpsim = Callable[..., tuple[int, str, str]]
SCRIPT = """
import importlib.util, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

for name in ("msgspec", "mpi4py", "numba", "pandas", "scipy"):
    assert importlib.util.find_spec(name) is None, name
assert os.environ.get("SITE") == "customized"
assert sys.prefix == os.environ.get("VIRTUAL_ENV", sys.prefix)
if importlib.util.find_spec("numpy"):
    import numpy
    print("NumPy", numpy.__version__)
    numpy.random.normal()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 4))
if "--shard" in sys.argv:
    from torch.distributed.fsdp import fully_shard
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(960, 12), torch.randint(4, (960,)))
sampler = DistributedSampler(data, shuffle=True)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for values, labels in DataLoader(data, batch_size=16, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(values), labels).backward()
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module", params=["PyTorch alone", "PyTorch with NumPy 1.26"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The Python of a job's environment, whose own ``sitecustomize`` has to run, and the NumPy that it has."""
    folder = tmp_path_factory.mktemp("job") / "env"
    python = environments.with_torch(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "sitecustomize.py").write_text("import os\nos.environ['SITE'] = 'customized'\n", encoding="utf-8")
    if request.param == "PyTorch alone":
        return python, ""
    if problem := environments.install(folder, "numpy==1.26.4"):
        pytest.skip(f"NumPy 1.26.4 cannot be installed here: {problem[-200:]}")
    return python, "1.26.4"


def test_a_script_is_profiled_and_compared_with_the_python_of_its_job(
    job: tuple[Path, str], dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, numpy = job
    script, output = tmp_path / "train.py", tmp_path / "w.json"
    script.write_text(SCRIPT)
    profile = ("profile", "--torch-script", script, "--devices", "4", "--steps", "6", "--output", output)
    code, _, err = dpsim(*profile, "--python", python)
    assert code == 0, err
    assert f"train.py runs with {python} (Python 3." in err and ("NumPy 1.26.4" in err) == bool(numpy)
    of_ddp = workloads.read(output)
    assert of_ddp.ddp is not None and of_ddp.ddp.bucket_bytes == (4 * (12 * 40 + 40 + 40 * 4 + 4),)
    assert of_ddp.local_batches == (16,) and [layer.name for layer in of_ddp.layers] == ["0", "3"]

    monkeypatch.setenv("VIRTUAL_ENV", str(python.parents[1]))  # as where the environment is active
    code, _, err = dpsim(*profile, "--", "--shard")
    assert code == 0, err
    sharded = workloads.read(output)
    assert sharded.ddp is not None and [unit.size_bytes for unit in sharded.ddp.units] == [of_ddp.gradient_bytes]

    code, out, err = dpsim("reproduce", "--torch-script", script, "--devices", "1,2,4", "--steps", "4", "--json")
    assert code == 0, out + err
    assert [point["finding"] for point in json.loads(out)["points"]] == [{}, {}]


def test_a_sweep_measures_ranks_of_the_environment_of_their_job(
    job: tuple[Path, str], dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, _ = job
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("range(4)", "range(4000)"))
    monkeypatch.setenv("VIRTUAL_ENV", str(python.parents[1]))
    sweep = ("sweep", "--torch-script", script, "--budget", "4s", "--output", tmp_path / "report", "--json")
    code, out, err = dpsim(*sweep, "--devices", "1,2", "--fusion-threshold", "0,inf")
    assert code == 0, out + err
    assert err.count(f"train.py runs with {python} (Python 3.") == 1
    points = json.loads(out)["points"]
    assert {point["devices"] for point in points} == {1, 2} and len(points) >= 3
    assert all(point["measured_step_s"] > 0 and point["predicted_step_s"] > 0 for point in points)
    code, out, err = dpsim(*sweep, "--algorithm", "gloo,mpi")
    assert (code, out) == (2, "") and f"--algorithm mpi with a script that runs with {python}" in err
    assert f"--python {sys.executable}" in err


def test_tune_predicts_a_job_on_another_machine_from_its_own_environment(
    job: tuple[Path, str], dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, _ = job
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("PATH", str(python.parent), prepend=":")  # as where only its torchrun is found
    monkeypatch.chdir(tmp_path)
    code, out, err = dpsim("tune", "--torch-script", script, "--machine", MACHINE, "--devices", "2,4")
    assert code == 0, out + err
    assert err.count(f"train.py runs with {python.parent / 'python3'}") == 1 and "DDP on 4 devices" in out


def test_a_script_is_explained_on_ranks_of_its_own_environment(
    job: tuple[Path, str], dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, _ = job
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("VIRTUAL_ENV", str(python.parents[1]))
    code, out, err = dpsim("explain", "--torch-script", script, "--steps", "30", "--json")
    assert code == 0, out + err
    assert f"train.py runs with {python}" in err
    assert {"computation", "communication"} <= {point["kind"] for point in json.loads(out)["points"]}


def test_a_job_is_explained_in_its_own_environment(job: tuple[Path, str], tmp_path: Path) -> None:
    python, _ = job
    script, line = tmp_path / "train.py", tmp_path / "line.json"
    script.write_text(SCRIPT)
    environment = os.environ | {
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
        "VIRTUAL_ENV": str(python.parents[1]),
    }
    command = [sys.executable, "-m", "dpsim", "explain", "--steps", "10", "--json-line", line, "--"]
    job_command = ["torchrun", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*command, *job_command], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stderr and json.loads(line.read_text())["summary"], done.stderr
