"""What a profile of a script says of its memory, against the peak of its live tensors in PyTorch's own profile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpsim import codec
from dpsim.machine import Link, Machine
from dpsim.model.memory import Memory, memory
from dpsim.model.recomputation import recomputing
from dpsim.plan import Plan
from dpsim.strategy import Zero3
from dpsim.workload import Workload

SCRIPTS = Path(__file__).parents[1] / "support" / "script_memories.py"
FSDP = ("fsdp", "fsdp, deferred", "fsdp, not deferred", "fsdp, kept whole", "fsdp, replicas", "fsdp, replicas deferred")
KINDS = (
    *("mlp", "cnn with batch norm", "transformer", "accumulation", *FSDP, "checkpointing"),
    *("fsdp in bfloat16", "mlp by autocast", "mlp of bfloat16"),
)

AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
SCRATCH_WITH_AMX = ("mlp of bfloat16",)
"""Where products of bfloat16 take scratch memory on processors with AMX: not a number of bytes for each sample."""

Cases = dict[str, list[tuple[Workload, int]]]

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def cases() -> Cases:
    """Of each kind of script two profiles, at a batch each, and the largest sum of its live tensor bytes."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'dpsim[torch]'")
    quiet = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ran = subprocess.run(
        [sys.executable, SCRIPTS], env=os.environ | quiet, stdout=subprocess.PIPE, text=True, check=True, timeout=1100
    )
    results: dict[str, list[Any]] = json.loads(ran.stdout)
    return {
        kind: [(codec.decode(workload, Workload, "workload"), peak) for workload, peak in each]
        for kind, each in results.items()
    }


def needed(workload: Workload, local_batch: int, *, memory_bytes: float = 2**34) -> Memory:
    """What the script itself is predicted to need at a batch."""
    ddp = workload.ddp
    assert ddp is not None
    plan = Plan(
        devices=ddp.devices,
        global_batch=ddp.devices * local_batch * ddp.accumulate,
        accumulate=ddp.accumulate,
        fusion_rule=ddp.fusion_rule,
        strategy=Zero3(replicas=ddp.replicas).text if ddp.units else "data-parallel",
    )
    return memory(
        workload,
        plan,
        Machine(name="a machine", link=Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9), memory_bytes=memory_bytes),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_of_a_profiled_script_is_its_peak_at_its_batch_and_at_the_other(cases: Cases, kind: str) -> None:
    batches = [workload.local_batches[0] for workload, _ in cases[kind]]
    for workload, _ in cases[kind]:
        for batch, (_, peak) in zip(batches, cases[kind], strict=True):
            if kind in SCRATCH_WITH_AMX and AMX and batch != workload.local_batches[0]:
                continue
            assert needed(workload, batch).total == pytest.approx(peak, rel=0.1), (workload.local_batches, batch)


@pytest.mark.parametrize(
    ("kind", "other", "recompute"), [("checkpointing", "transformer", "none"), ("transformer", "checkpointing", "all")]
)
def test_the_memory_with_and_without_recomputation_is_the_peak_of_the_script_that_was_changed(
    cases: Cases, kind: str, other: str, recompute: str
) -> None:
    for (workload, _), (_, peak) in zip(cases[kind], cases[other], strict=True):
        changed = recomputing(workload, recompute)
        assert needed(changed, workload.local_batches[0]).total == pytest.approx(peak, rel=0.1)


def test_whether_a_profiled_script_fits_is_known(cases: Cases) -> None:
    workload, peak = cases["transformer"][-1]
    batch = workload.local_batches[0]
    assert needed(workload, batch, memory_bytes=1.1 * peak).fits is True
    assert needed(workload, batch, memory_bytes=0.9 * peak).fits is False


def test_gradients_that_are_views_of_buckets_are_there_once(cases: Cases) -> None:
    workload, _ = cases["mlp"][0]
    assert workload.ddp is not None
    views = msgspec.structs.replace(workload, ddp=msgspec.structs.replace(workload.ddp, gradients="buckets"))
    parts = needed(views, 32)
    assert (parts.gradients, parts.communication_buffers) == (workload.gradient_bytes, 0)
