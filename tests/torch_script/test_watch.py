"""``dpsim explain`` of a job with two ranks: what it says, what it leaves of the job, and what killing it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dpsim import codec
from dpsim.launch import watched_job
from dpsim.torch.script.watched import WatchedRank

SCRIPT = """
import os, pathlib, sys, time, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

FORWARD = DDP.forward  # before a model is made

def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    ddp = DDP(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(STEPS):
        if rank == 1:
            time.sleep(0.15)
        optimizer.zero_grad()
        ddp(torch.randn(4, 32)).sum().backward()
        optimizer.step()
        if step == 1 and rank == 0:
            pathlib.Path(folder, "training").touch()
            while WAIT and not pathlib.Path(folder, "go").exists():
                time.sleep(0.01)
    pathlib.Path(folder, f"ended-{rank}").write_text("as it was" if DDP.forward is FORWARD else "changed")

if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1],), nprocs=2)
    sys.exit(7)
"""
CLOSURE = """
import time, torch
import torch.distributed as dist

class Update(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        time.sleep(0.02)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
ddp = torch.nn.parallel.DistributedDataParallel(model)
ddp.eval()
model.train(TRAINS)
optimizer = Update(ddp.parameters(), lr=0.01)

def closure():
    optimizer.zero_grad()
    result = ddp(torch.ones(2, 4))
    time.sleep(0.02)
    result.sum().backward()

for _ in range(15):
    optimizer.step(closure=closure)
"""
DEADLINE_S = 300


def watch(folder: Path, *, steps: int, wait: bool = False) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("STEPS", str(steps)).replace("WAIT", str(wait)), encoding="utf-8")
    temporary = folder / "tmp"
    temporary.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "dpsim", "explain", "--", sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )


def states(folder: Path) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("ended-*"))]


@pytest.mark.torch
def test_a_slow_rank_is_named_and_the_job_ends_as_it_would(tmp_path: Path) -> None:
    with watch(tmp_path, steps=45) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7 and out == "", err
    assert "anks wait for the slowest" in err and "rank 1, which takes" in err, err
    assert states(tmp_path) == ["as it was", "as it was"]
    assert not list((tmp_path / "tmp").glob("dpsim*"))


@pytest.mark.torch
def test_a_job_that_ends_too_soon_is_said(tmp_path: Path) -> None:
    with watch(tmp_path, steps=3) as process:
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7 and "the job ended after 0 steps" in err, err


@pytest.mark.torch
def test_killing_it_does_no_harm_to_the_job(tmp_path: Path) -> None:
    with watch(tmp_path, steps=45, wait=True) as process:
        while not (tmp_path / "training").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        (tmp_path / "go").touch()
        process.communicate(timeout=DEADLINE_S)  # until the job, too, has closed its output
    assert states(tmp_path) == ["as it was", "as it was"]


@pytest.mark.torch
@pytest.mark.parametrize("trains", [True, False])
def test_the_wrapper_may_be_in_evaluation_mode_and_an_update_may_call_a_closure(tmp_path: Path, trains: bool) -> None:
    """So it is with Lightning's Trainer, whose check of the validation loop leaves the wrapper in evaluation mode."""
    script, folder = tmp_path / "train.py", tmp_path / "records"
    script.write_text(CLOSURE.replace("TRAINS", str(trains)), encoding="utf-8")
    folder.mkdir()
    subprocess.run([sys.executable, str(script)], env=watched_job.environment(folder, 6), check=True)
    record = codec.decode(codec.read_raw(*folder.glob("rank-0-*.json"), "record"), WatchedRank, "record")
    assert len(record.steps) == 6
    for step in record.steps:
        assert step.update_s >= 0.02
        assert step.forward_s + step.backward_s + step.update_s + 0.02 <= step.computed_s - step.began_s
