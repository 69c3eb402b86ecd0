"""``dpsim explain``: ranks of a script under observation, traces of ranks, and what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kineto_traces
import pytest
from benchmark_outputs import nccl, ranks
from kineto_traces import event, host_step

from dpsim import codec
from dpsim.model.observed import ObservedStep, Steps
from dpsim.torch.script.kineto.ranks import observed_traces

Dpsim = Callable[..., tuple[int, str, str]]
SCRIPT = """
import time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DDP(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]), bucket_cap_mb=CAP)
HOOK
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for (x,) in DataLoader(TensorDataset(torch.randn(100_000, 32)), batch_size=4):
    if dist.get_rank() == 1:
        time.sleep(SLEEP)
    optimizer.zero_grad()
    ddp(x).sum().backward()
    optimizer.step()
"""
HOOK = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
ddp.register_comm_hook(None, allreduce_hook)
"""


def a_script(folder: Path, *, sleep: float = 0.0, cap: float = 25, hook: str = "") -> Path:
    path = folder / "train.py"
    text = SCRIPT.replace("SLEEP", str(sleep)).replace("CAP", str(cap)).replace("HOOK", hook)
    path.write_text(text, encoding="utf-8")
    return path


def explained(dpsim: Dpsim, *arguments: object) -> dict[str, Any]:
    code, out, err = dpsim("explain", *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    parts = sum(part["seconds"] for part in found["points"])
    assert parts == pytest.approx(found["summary"]["step_s"], rel=1e-9)
    return found


@pytest.mark.torch
def test_a_rank_that_sleeps_is_named(dpsim: Dpsim, tmp_path: Path) -> None:
    found = explained(dpsim, "--torch-script", a_script(tmp_path, sleep=0.2), "--steps", "20")
    assert found["summary"]["causes"][0] == "slowest rank"
    assert "go to rank 1, which takes" in found["summary"]["cause"]
    communication = next(part for part in found["points"] if part["kind"] == "communication")
    assert communication["details"][0].startswith("bucket 1 of 1")


@pytest.mark.torch
def test_a_script_with_a_bucket_for_each_tensor_is_observed_with_larger_ones_too(dpsim: Dpsim, tmp_path: Path) -> None:
    script = a_script(tmp_path, cap=1e-6)
    code, _, err = dpsim("explain", "--torch-script", script, "--steps", "20", "--network", "paced:1ms,1gbit")
    assert code == 0, err
    assert "8 buckets: in turns with DDP's default of 25 MiB, 2 of 2" in err


@pytest.mark.torch
def test_a_hook_of_the_scripts_own_stays_and_has_no_place_on_an_emulated_link(dpsim: Dpsim, tmp_path: Path) -> None:
    script = a_script(tmp_path, hook=HOOK)
    found = explained(dpsim, "--torch-script", script, "--steps", "20")
    assert all(part["details"] == [] for part in found["points"] if part["kind"] == "communication")
    code, out, err = dpsim("explain", "--torch-script", script, "--network", "paced:1ms,1gbit")
    assert (code, out) == (2, "")
    assert "communication hook of its own" in err and "leave --network out" in err and "Traceback" not in err


@pytest.mark.torch
def test_an_update_that_calls_a_closure_is_timed_without_it() -> None:
    """Lightning's Trainer runs forward and backward within the optimizer's step."""
    import torch

    from dpsim.torch.script.probe.endings import EnoughSteps
    from dpsim.torch.script.probe.in_turns.observed import Observer

    def slow_forward(ddp: Any, batch: Any) -> Any:
        time.sleep(0.01)
        return ddp(batch)

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        observer, optimizer = Observer(3, lambda _: None), torch.optim.SGD(ddp.parameters())
        with pytest.raises(EnoughSteps):
            while True:
                observer.before_update(optimizer)
                loss = observer.forward(slow_forward, ddp, torch.ones(2, 4)).sum()
                observer.backward(loss.backward)
                observer.after_update(optimizer)
    finally:
        torch.distributed.destroy_process_group()
    for record in observer.steps:
        step = codec.convert(record, ObservedStep)
        assert step.forward_s >= 0.01
        assert step.forward_s + step.backward_s + step.update_s <= step.computed_s - step.began_s


@pytest.mark.torch
@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("raise ValueError('no data')", "raised ValueError on rank"),
        ("print('nothing to train')", "ended without training a DistributedDataParallel model"),
    ],
)
def test_a_script_that_cannot_be_explained_gives_one_message(
    text: str, given: str, dpsim: Dpsim, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    code, out, err = dpsim("explain", "--torch-script", path)
    assert (code, out) == (2, "")
    assert given in err and err.count("dpsim:") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("", "nothing to explain"),
        ("--measured 1:0.4s --trace t.json", "--trace and --measured"),
        ("--measured 1:0.4s,16:0.6s", "neither --workload nor --parameters"),
        ("--measured 0.4s --parameters 5", "--measured is '0.4s'"),
        ("--measured 1:9/s,2:9/s --parameters 5", "--measured 1:9/s without a batch"),
        ("--measured 8:0.4s --parameters 5", "step times of 8 devices alone"),
        ("--measured 1:0.4s,8:1s --parameters x", "--parameters is 'x'"),
        ("--measured 1:0.4s,8:1s --parameters 5 --local-batch 1 --global-batch 8", "--local-batch with --global-batch"),
        ("--measured 1:0.4s,8:1s --parameters 5 --machine m --network-log l", "--machine with --network-log"),
        ("--measured 1:0.4s,8:1s --parameters 5 --devices 2", "--devices with --measured"),
        ("--trace t.json --local-batch 3", "--local-batch with --trace"),
        ("--torch-script absent.py --parameters 5", "--parameters with --torch-script"),
        ("--trace absent.json", "absent.json"),
        pytest.param("--torch-script absent.py", "absent.py", marks=pytest.mark.torch),
        ("--torch-script absent.py --devices 1", "--devices is 1"),
        ("--torch-script absent.py --steps 3", "--steps is 3"),
    ],
)
def test_mistakes_give_one_message(arguments: str, given: str, dpsim: Dpsim) -> None:
    code, out, err = dpsim("explain", *arguments.split())
    assert (code, out) == (2, "")
    assert given in err and "Traceback" not in err


def test_step_times_are_explained_without_torch(dpsim: Dpsim) -> None:
    found = explained(
        dpsim, "--parameters", "138357544", "--local-batch", "32", "--measured", "1x8:1531.9/s,2x8:546.9/s"
    )
    assert found["summary"]["causes"] == ["communication"]
    assert found["summary"]["step_s"] == pytest.approx(16 * 32 / 546.9)


def test_a_row_of_the_log_that_jumps_is_left_out_and_told(dpsim: Dpsim, tmp_path: Path) -> None:
    times = [(size, 10.0 * (20 if size == 2**16 else 1) + size / 1e4) for size in (2**n for n in range(10, 28, 2))]
    log = tmp_path / "allreduce.txt"
    log.write_text(nccl(times, times, 8, lines_of_ranks=ranks(["alpha"] * 4 + ["beta"] * 4)))
    code, out, err = dpsim(
        *[
            "explain",
            "--parameters",
            "138357544",
            "--local-batch",
            "32",
            "--measured",
            "1:245/s,2x4:546.9/s",
            "--network-log",
        ],
        log,
    )
    assert code == 0 and "communication" in out
    (line,) = [each for each in err.splitlines() if "65536 bytes in" in each]
    assert line.startswith("warning: ") and "left out" in line


def traces(folder: Path, *shifts_us: float) -> list[Path]:
    """Traces of ranks whose steps are the same, on clocks that differ by the shifts."""
    paths = []
    for rank, shift_us in enumerate(shifts_us):
        events = [each for number in range(6) for each in host_step(number, shift_us + 10_000 * number)]
        paths.append(kineto_traces.write(folder / f"rank{rank}.json", events))
    return paths


def test_traces_of_ranks_are_put_on_one_clock(tmp_path: Path) -> None:
    one, both = (Steps(observed_traces(traces(tmp_path, *shifts_us))[0]) for shifts_us in ((0.0,), (0.0, 5e9)))
    assert both.wait_s == pytest.approx(0.0, abs=1e-6)
    assert both.step_s == pytest.approx(one.step_s, abs=1e-6)


def test_other_collectives_of_a_trace_are_a_part_of_their_own(dpsim: Dpsim, tmp_path: Path) -> None:
    """Half of an all_to_all of 2 ms lies within the forward, whose computation it is not."""
    events, longer = [], []
    for number in range(6):
        step = host_step(number, 10_000 * number)
        forward_us = next(each["ts"] for each in step if each["name"] == "DistributedDataParallel.forward")
        events += step
        longer += [*step, event("gloo:all_to_all", forward_us - 1000, forward_us + 1000, thread=9)]
    plain, other = (
        {each["kind"]: each["seconds"] for each in explained(dpsim, "--trace", str(path))["points"]}
        for path in (kineto_traces.write(tmp_path / f"{len(all_)}.json", all_) for all_ in (events, longer))
    )
    assert other["other collectives"] == pytest.approx(2e-3) and "other collectives" not in plain
    assert plain["computation"] - other["computation"] == pytest.approx(1e-3)


def test_traces_are_explained(dpsim: Dpsim, tmp_path: Path) -> None:
    found = explained(dpsim, "--trace", ",".join(map(str, traces(tmp_path, 0.0, 1e6))))
    assert found["summary"]["step_s"] == pytest.approx(0.01)


def test_traces_of_different_lengths_are_refused(dpsim: Dpsim, tmp_path: Path) -> None:
    paths = traces(tmp_path, 0.0)
    events = [each for number in range(3) for each in host_step(number, 10_000 * number)]
    paths.append(kineto_traces.write(tmp_path / "rank1.json", events))
    code, out, err = dpsim("explain", "--trace", ",".join(map(str, paths)))
    assert (code, out) == (2, "")
    assert "traces of 6, 3 steps" in err
