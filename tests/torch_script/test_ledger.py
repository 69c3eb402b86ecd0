"""A script that was predicted, and runs: its line, and that of another cap, batch and optimizer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Dpsim = Callable[..., str]
DDP = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1)
dist.init_process_group("gloo")
given = dict(word.split("=") for word in sys.argv[1:])
cap = {"bucket_cap_mb": float(given["cap"])} if "cap" in given else {}
width = int(given.get("width", 64))
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)]), **cap)
kind = getattr(torch.optim, given.get("optimizer", "AdamW"))
optimizer = kind(model.parameters(), lr=1e-3)
x = torch.randn(int(given.get("batch", 8)), width)
for step in range(400):
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
FSDP = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(63, 63) for _ in range(3)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
for step in range(400):
    optimizer.zero_grad()
    model(torch.randn(8, 63)).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
MACHINE = """
schema = "dpsim.machine/1"
name = "as dpsim calibrates it"
network = "node"
relative_uncertainty = 0.05
[link]
latency_s = "1ms"
bandwidth_bytes_per_s = "10gbit"
"""
_MATCHED = re.compile(
    r"^(Predicted .*; measured .*: (in|out)side.*|Not scored: \d+ clean steps were measured.*)$", re.M
)
"""A line of the ledger for the job itself; how many of its steps are clean, other processes decide."""


@pytest.fixture
def run(tmp_path: Path) -> Dpsim:
    kept = {"DPSIM_STUDIES_DIR": str(tmp_path / "kept"), "DPSIM_LEDGER": "on", "CI": "", "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dpsim", *words],
            cwd=tmp_path,
            env=os.environ | kept,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0 or words[0] == "explain", done.stderr  # gloo may abort at a job's end
        return done.stdout + done.stderr

    return run


def explained(run: Dpsim, script: str, *arguments: str) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    return run("explain", "--steps", "60", "--", *torchrun, *arguments)


def predicted(run: Dpsim, folder: Path, script: str) -> None:
    (folder / "m.toml").write_text(MACHINE)
    run("profile", "--torch-script", script, "--devices", "2", "--output", "w.json")
    run("predict", "--workload", "w.json", "--machine", "m.toml", "--devices", "2")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_of_ddp_is_scored_and_one_that_changed_is_not(run: Dpsim, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DDP)
    predicted(run, tmp_path, "train.py")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "renamed.py").write_text(DDP)
    assert _MATCHED.search(explained(run, "elsewhere/renamed.py"))
    for changed, differs in (
        ("cap=0.01", "bucket cap default and not 10485 bytes"),
        ("optimizer=SGD", r"optimizer AdamW(exp_avg, exp_avg_sq) and not SGD()"),
    ):
        assert f"of {differs}" in explained(run, "train.py", changed)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_of_fsdp_is_scored(run: Dpsim, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FSDP)
    predicted(run, tmp_path, "train.py")
    assert _MATCHED.search(explained(run, "train.py"))
