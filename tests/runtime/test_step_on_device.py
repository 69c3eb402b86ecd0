"""A step in the memory of a device, as the host sees it: it asks for everything, and waits once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from queued_device import QueuedMemory, QueuedTransport

from dpsim.kernels import update as on_host
from dpsim.lowering import lower
from dpsim.nn import build_model
from dpsim.nn.device_ops import DeviceOps
from dpsim.plan import Plan
from dpsim.replica import Batch
from dpsim.runtime.describe import describe
from dpsim.runtime.step import StepRunner


def runner(memory: QueuedMemory, monkeypatch: pytest.MonkeyPatch, **plan: Any) -> StepRunner:
    """The step of a multilayer perceptron on the first of two devices, with a bucket a tensor."""
    monkeypatch.setattr("dpsim.runtime.shard_update._kernels", lambda _: on_host)
    replica = build_model("mlp:4,4", (3, 1, 1), 2, ops=DeviceOps(memory))
    lowered = lower(describe(replica, "model"), Plan(devices=2, global_batch=4, fusion_threshold_bytes=1.0, **plan))
    opened = StepRunner(replica, lowered, QueuedTransport(memory))
    opened.warm_up()
    opened.initialise(0)
    memory.log.clear()
    return opened


def batch() -> Batch:
    x = np.random.default_rng(0).standard_normal((2, 3, 1, 1)).astype(np.float32)
    return Batch(x=x, labels=np.array([0, 1]), leaves=(0, 2))


@pytest.mark.parametrize("overlap", ["off", "inline", "poll", "thread"])
def test_the_host_asks_for_all_allreduces_and_then_waits_once(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = QueuedMemory()
    step = runner(memory, monkeypatch, overlap=overlap)
    for number in range(2):
        memory.log.clear()
        outcome = step.run(batch(), 4)
        log = [entry for entry in memory.log if entry != "mark"]
        assert log.count("allreduce") == step.schedule.buckets and log[-1] == "fetch" and log.count("fetch") == 1
        assert log[-2] == "follow allreduce"  # the update comes after the last allreduce by itself
        assert log.count("follow allreduce") == (4 if overlap == "inline" else 1)
        assert step.steps == number + 1 and outcome.sums.samples == 2
    step.close()
