"""Profiles of one process and of several at once: which ones count, and what they say of a step on several devices."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dpsim.errors import ConfigError
from dpsim.harness.torch_ddp import contention
from dpsim.harness.torch_ddp.contention import Effort, compute_slowdown, computed_s, profiled, profiled_on_cores
from dpsim.machine import AllreduceCost, Link, Machine
from dpsim.torch_ddp.profile_script import profile_script
from dpsim.torch_ddp.request import ScriptRequest
from dpsim.workload import Layer, Tensor, Workload

ALONE_S = 10e-3


def workload(step_s: float, local_batch: int = 8) -> Workload:
    layer = Layer(
        name="0",
        kind="module",
        forward_s=(step_s / 2,),
        backward_s=(step_s / 2,),
        tensors=(Tensor(name="w", shape=(64, 64)),),
    )
    return Workload(name="script", source="test", local_batches=(local_batch,), layers=(layer,), update_s=0.0)


def test_the_slowest_of_several_counts_and_the_median_of_repeats() -> None:
    alone = workload(ALONE_S)
    together = [[workload(ALONE_S * factor) for factor in pair] for pair in ((1.1, 1.3), (1.2, 1.0), (2.0, 1.1))]
    slowdown = compute_slowdown(alone, together)
    assert slowdown.devices == 2 and slowdown.factor == pytest.approx(1.3) and slowdown.half_width > 0
    assert compute_slowdown(alone, [[workload(0.9 * ALONE_S)] * 3]).factor == 1, "several are never faster than one"


def test_profiles_at_once_pause_for_an_allreduce_and_those_alone_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int | None, float]] = []

    def profiled_on_cores(request: ScriptRequest, devices: int) -> list[Workload]:
        asked.append((devices, request.local_batch, request.pause_s))
        batch = request.local_batch or 0
        seconds = ALONE_S * batch * (1.0 if devices == 1 else 1.25)
        return [workload(seconds, batch)] * devices

    monkeypatch.setattr(contention, "profiled_on_cores", profiled_on_cores)
    table = AllreduceCost(algorithm="gloo", devices=2, sizes_bytes=(1024, 16384), time_s=(1e-3, 4e-3))
    machine = Machine(name="pair", link=Link(latency_s=0.0, bandwidth_bytes_per_s=1e9), allreduce=(table,))
    requests = [ScriptRequest(script="train.py", devices=2, local_batch=batch) for batch in (1, 2, 4)]
    steps_s = [ALONE_S * batch for batch in (1, 2, 4)]
    of_one, (slower,) = profiled(requests, steps_s, [machine], Effort(seconds=0.1, repeats=2), lambda line: None)
    assert of_one.local_batches == (1, 2, 4)
    assert {each for each in asked if each[0] == 1} == {(1, batch, 0.0) for batch in (1, 2, 4)}
    assert {each for each in asked if each[0] == 2} == {(2, 1, 4e-3), (2, 4, 4e-3)}
    (slowdown,) = slower.compute_slowdown
    assert (slowdown.devices, slowdown.added_s) == (2, 0.0) and slowdown.factor == pytest.approx(1.25)


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_a_pause_counts_for_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nimport torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "dist.init_process_group('gloo')\nddp = DDP(torch.nn.Linear(8, 8))\n"
        "for _ in range(1000):\n    ddp(torch.randn(4, 8)).sum().backward()\n"
    )
    request = ScriptRequest(script=str(script), devices=2, steps=9, pause_s=0.4)
    begin_s = time.monotonic()
    paused = profile_script(request)
    assert time.monotonic() - begin_s > 9 * 0.4
    assert computed_s(paused) < 0.4


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_where_one_of_several_scripts_fails_the_others_are_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    last = sorted(os.sched_getaffinity(0))[:2][-1]
    script.write_text(
        "import os, time\n"
        f"if os.sched_getaffinity(0) == {{{last}}}:\n    raise ValueError('only this one')\n"
        "time.sleep(1000)\n"
    )
    with pytest.raises(ConfigError, match="only this one"):
        profiled_on_cores(ScriptRequest(script=str(script), devices=2), 2)
