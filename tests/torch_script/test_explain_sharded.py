"""``dpsim explain`` of scripts with ``fully_shard``: planted causes are named, in dpsim's ranks or in the job."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Dpsim = Callable[..., tuple[int, str, str]]
SCRIPT = """
import hashlib, os, sys, time, torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(LOADS if dist.get_rank() == 1 else 0)
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))

class Slow(torch.nn.Module):
    def forward(self, values):
        time.sleep(COMPUTES if dist.get_rank() == 1 else 0)
        return values

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)], Slow())
for layer in model[:-1]:
    fully_shard(layer, mp_policy=POLICY)
fully_shard(model, mp_policy=POLICY)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number, values in enumerate(DataLoader(Data(), batch_size=1)):
    last = number % MICRO_BATCHES == MICRO_BATCHES - 1
    if DEFERS:
        model.set_requires_gradient_sync(last)
    (model(values).float().square().mean() / MICRO_BATCHES).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
    if number == STOP:
        break
weights = [parameter.full_tensor().detach().numpy().tobytes() for parameter in model.parameters()]
if dist.get_rank() == 0:
    print(hashlib.sha256(b"".join(weights)).hexdigest())
dist.destroy_process_group()
"""
DEFAULTS: dict[str, object] = {
    "LOADS": 0,
    "COMPUTES": 0,
    "LAYERS": 2,
    "WIDTH": 32,
    "MICRO_BATCHES": 1,
    "DEFERS": False,
    "POLICY": "MixedPrecisionPolicy()",
    "STOP": 10**6,
}
DEADLINE_S = 300


def a_script(folder: Path, **changes: object) -> Path:
    text = SCRIPT
    for name, value in (DEFAULTS | changes).items():
        text = text.replace(name, str(value))
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return path


def explained(dpsim: Dpsim, script: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    code, out, err = dpsim("explain", "--torch-script", script, "--steps", "20", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert sum(part["seconds"] for part in found["points"]) == pytest.approx(found["summary"]["step_s"], rel=1e-9)
    return found["summary"], {part["kind"]: part for part in found["points"]}


@pytest.mark.torch
def test_a_slow_loader_of_one_rank_and_its_remedies_are_named(dpsim: Dpsim, tmp_path: Path) -> None:
    """A policy gathers in 16 bits and reduces in 32."""
    policy = "MixedPrecisionPolicy(torch.bfloat16, torch.float32)"
    summary, parts = explained(dpsim, a_script(tmp_path, LOADS=0.1, POLICY=policy))
    assert summary["causes"][0] == "slowest rank"
    assert "rank 1, which takes" in summary["cause"] and "mostly in its loader" in summary["cause"]
    assert parts["communication"]["details"][0].startswith("4 gathers of 2.062 KiB")
    assert parts["communication"]["details"][1].startswith("2 reduce-scatters of 4.125 KiB")
    assert any("a link 10 times as fast" in each["text"] for each in summary["remedies"])


@pytest.mark.torch
def test_a_rank_that_computes_longer_is_named(dpsim: Dpsim, tmp_path: Path) -> None:
    summary, parts = explained(dpsim, a_script(tmp_path, COMPUTES=0.1))
    assert summary["causes"][0] == "slowest rank"
    assert "rank 1, which takes" in summary["cause"] and "mostly in its forward" in summary["cause"]
    assert parts["slowest rank"]["seconds"] > 0.05


@pytest.mark.torch
def test_units_of_tiny_layers_are_told_from_larger_ones(dpsim: Dpsim, tmp_path: Path) -> None:
    summary, parts = explained(dpsim, a_script(tmp_path, LAYERS=40, WIDTH=8))
    assert "small buckets" in summary["causes"]
    assert parts["small buckets"]["text"].startswith("40 units of fully_shard of 288 B, against 1 of which")


@pytest.mark.torch
@pytest.mark.parametrize("defers", [False, True])
def test_a_job_says_what_deferring_would_save_and_trains_the_same_bits(tmp_path: Path, *, defers: bool) -> None:
    script = a_script(tmp_path, MICRO_BATCHES=4, DEFERS=defers, STOP=127 if defers else 31, COMPUTES=0.02)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = [
        subprocess.run([*before, *torchrun], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        for before in ([], [sys.executable, "-m", "dpsim", "explain", "--steps", "12", "--"])
    ]
    assert len(ended[0].stdout.split()) == 1 and ended[0].stdout == ended[1].stdout
    answer = ended[1].stderr
    assert "12 steps of the job itself" in answer and "rank 1, which takes" in answer
    assert ("4 micro-batches reduce 4 times; deferring (set_requires_gradient_sync)" in answer) != defers
    assert ("and needs 4.125 KiB more" in answer) != defers
    assert "No bucket cap is advised for its 2 units" in answer
