"""Trains in mixed precision, in each way of ``MODES``: what each sends in a step, or what a profile says of it.

``python mixed_precision.py profile`` prints a JSON object of (workload, when its steps began, when skipped steps did);
``python mixed_precision.py RANK STORE`` is one of two ranks of gloo, of which rank 0 prints what each way sends.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import torch
from torch import distributed, nn, optim
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dpsim import codec
from dpsim.torch.script.probe import process_group
from dpsim.torch.script.probe.endings import EnoughSteps
from dpsim.torch.script.probe.record import Recorder
from dpsim.torch.script.probe.run_script import install
from dpsim.torch.script.probe.script_record import script_record
from dpsim.torch.script.recorded import workload_of
from dpsim.torch.script.request import ScriptRequest
from dpsim.torch.script.script_record import ScriptRecord, recorded_of

OVERFLOWING = "overflowing scaler"
MODES = ("autocast", "scaler", "parameters", "some parameters", "policy", "policy reduces in float32", "float16 policy")
_STEPS, _RANKS = 5, 2
_GATHER = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
_REDUCE = "reduce_scatter_single" if hasattr(distributed, "reduce_scatter_single") else "reduce_scatter_tensor"


class Mixed(nn.Module):
    """Linear layers, of which all but the norm compute in another type where their parameters have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(15, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 5)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.float()


def policy(mode: str) -> Any:
    if mode == "float16 policy":
        return MixedPrecisionPolicy(param_dtype=torch.float16)
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32 if mode.endswith("float32") else None)


def wrapped(mode: str) -> Any:
    module = Mixed()
    if "parameters" in mode:
        module.bfloat16()
    if mode == "some parameters":
        module.layers[1].float()
    if "policy" in mode:
        for layer in module.layers:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mp_policy=policy(mode))
        return fully_shard(module, mp_policy=policy(mode))
    return DistributedDataParallel(module, bucket_cap_mb=0.002)


def sent(model: Any, calls: list[tuple[str, int, str]]) -> dict[str, Any]:
    """What the last step has sent: DDP's buckets, or the bytes and the types of FSDP's collectives."""
    if isinstance(model, DistributedDataParallel):
        return {"buckets": model._get_ddp_logging_data()["rebuilt_bucket_sizes"]}
    return {"calls": calls}


def train(mode: str, steps: int, calls: list[tuple[str, int, str]]) -> Any:
    """Train, and return the model; ``calls`` are those of the last step."""
    torch.manual_seed(0)
    model = wrapped(mode)
    optimizer, scales = optim.AdamW(model.parameters()), mode in ("scaler", OVERFLOWING)
    grows = {"init_scale": 2.0**30, "growth_factor": 4.0, "growth_interval": 2} if mode == OVERFLOWING else {}
    scaler, dtype = torch.amp.GradScaler("cpu", enabled=scales, **grows), torch.float16 if scales else torch.bfloat16
    for _ in range(steps):
        calls.clear()
        with torch.autocast("cpu", dtype, enabled=scales or mode == "autocast"):
            loss = model(torch.randn(4, 15)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return model


def count(calls: list[tuple[str, int, str]]) -> None:
    """Let FSDP's collectives be noted: kind, bytes of the whole and type."""
    for kind, name in (("all-gather", _GATHER), ("reduce-scatter", _REDUCE)):
        original = getattr(distributed, name)

        def counted(*arguments: Any, of: Any = (kind, original), **named: Any) -> Any:
            tensors = [each for each in (*arguments, *named.values()) if isinstance(each, torch.Tensor)]
            whole = max(tensors, key=torch.Tensor.numel)
            calls.append((of[0], whole.numel() * whole.element_size(), str(whole.dtype).removeprefix("torch.")))
            return of[1](*arguments, **named)

        setattr(distributed, name, counted)


class Noting(Recorder):
    """A recorder that notes when the steps began whose update was skipped."""

    def __init__(self, wanted: int) -> None:
        super().__init__(wanted)
        self.skipped_s: list[float] = []

    def update_skipped(self) -> None:
        super().update_skipped()
        assert self._step is not None
        self.skipped_s.append(self._step.start_s)


def profiled(mode: str) -> Any:
    """What a profile says of a script, as rank 0 of two."""
    recorder = Noting(3)
    install(recorder)
    with contextlib.suppress(EnoughSteps):
        train(mode, 1000, [])
    recorder.leave()
    record = codec.convert(script_record(recorder), ScriptRecord)
    workload = workload_of(recorded_of(record, ScriptRequest(script="train.py", devices=_RANKS)))
    return codec.to_builtins(workload), [step.start_s for step in recorder.steps], recorder.skipped_s


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "profile":
        process_group.answer_for(_RANKS)
        distributed.init_process_group("gloo")
        print(json.dumps({mode: profiled(mode) for mode in (*MODES, OVERFLOWING)}))
        return
    store = distributed.FileStore(sys.argv[2], _RANKS)
    distributed.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=_RANKS)
    calls: list[tuple[str, int, str]] = []
    count(calls)
    results = {mode: sent(train(mode, _STEPS, calls), [*calls]) for mode in MODES}
    if distributed.get_rank() == 0:
        print(json.dumps(results), flush=True)
    distributed.barrier()
    os._exit(0)  # gloo's threads would abort the process as it ends


if __name__ == "__main__":
    main()
