"""The record of a script that ran in this process: its steps, its model, its settings. Loads torch."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import torch

from dpsim.torch.script.probe.fsdp import ShardedModel, plain_update_s
from dpsim.torch.script.probe.rank_record import ddp_record, identity, optimizer_slots, state_bytes, type_name
from dpsim.torch.script.probe.record import Recorder


def script_record(recorder: Recorder) -> dict[str, Any]:
    """Return what a recorder saw of a script that trained enough: a ``dpsim.torch.script.script_record.ScriptRecord``.

    Raises ``ConfigError`` for what a script told FSDP that is not predicted.
    """
    model, optimizer = recorder.ddp, recorder.optimizer
    inner = optimizer.optim if _is_zero_redundancy(optimizer) else optimizer
    return {
        "model": type(model.module).__name__.removeprefix("FSDP"),
        "steps": [asdict(step) for step in recorder.steps],
        "first_parameter": recorder.first_parameter,
        "optimizer_slots": optimizer_slots(inner, model.module),
        "sharded_optimizer": inner is not optimizer,
        "sync_batch_norm": synchronises_batch_norm(model.module),
        "input_workers": recorder.input_workers,
        "load_s_per_sample": recorder.load_s_per_sample,
        "memory": recorder.memory and asdict(recorder.memory),
        **(
            {"shards": _shards_record(model, optimizer) | identity(model, inner)}
            if isinstance(model, ShardedModel)
            else {"ddp": ddp_record(model) | identity(model, inner)}
        ),
    }


def _shards_record(model: ShardedModel, optimizer: Any) -> dict[str, Any]:
    """What was recorded of a model of ``fully_shard``: a ``dpsim.torch.script.script_record.ShardsRecord``."""
    return {
        "torch": str(torch.__version__),
        "device": model.device_type,
        "units": [unit._asdict() for unit in model.units],
        "parameters": [
            {
                "name": each.name,
                "module": each.unit,
                "shape": tuple(each.shard.shape),
                "dtype": type_name(each.shard.dtype),
                "gather_dtype": type_name(each.gathered),
                "reduce_dtype": type_name(each.reduced),
            }
            for each in model.parameters
        ],
        "state_bytes": state_bytes(model),
        "frozen_bytes": model.frozen_bytes,
        "update_s": plain_update_s(optimizer),
        "replicas": model.replicas,
    }


def synchronises_batch_norm(module: Any) -> bool:
    """Whether a batch norm of the module takes its statistics from all ranks."""
    return any(isinstance(each, torch.nn.SyncBatchNorm) for each in module.modules())


def _is_zero_redundancy(optimizer: Any) -> bool:
    """Tell whether an optimizer is a ``ZeroRedundancyOptimizer``.

    Its module is imported only where the script has imported it: it takes long, and warns of its own deprecated calls.
    """
    defined = sys.modules.get("torch.distributed.optim")
    return defined is not None and isinstance(optimizer, defined.ZeroRedundancyOptimizer)
