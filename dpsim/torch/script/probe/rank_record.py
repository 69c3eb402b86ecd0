"""The record of a watched rank: its steps, its model, its process. Loads the standard library and PyTorch alone."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch


def rank_record(watcher: Any, reason: str) -> dict[str, Any]:
    """Return what a watcher saw of its model, and what DDP logs: a ``dpsim.torch.script.watched.WatchedRank``."""
    ddp = watcher.ddp
    sharded = not isinstance(ddp, torch.nn.Module)
    logged = ddp.logged if sharded else dict(ddp._get_ddp_logging_data())
    return {
        "run": _run(),
        "rank": int(logged["rank"]),
        "ranks": int(logged["world_size"]),
        "ranks_here": int(os.environ.get("LOCAL_WORLD_SIZE") or logged["world_size"]),
        "reason": reason,
        "script": os.path.basename(getattr(sys.modules.get("__main__"), "__file__", None) or ""),
        "model": type(ddp.module).__name__,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "backend": watcher.backend,
        "steps": watcher.steps,
        "last_backward_s": watcher.last_backward_s,
        "loss_s": watcher.loss_s,
        "ready_ns": watcher.ready_ns,
        "local_batch": watcher.local_batch,
        "accumulate": watcher.accumulate,
        **(_units_record(ddp) | watcher.sizes if sharded else ddp_record(ddp)),
        "optimizer_slots": None if sharded else optimizer_slots(watcher.optimizer, ddp.module),
        **identity(ddp, watcher.optimizer),
        "sharded_optimizer": type(watcher.optimizer).__name__ == "ZeroRedundancyOptimizer",
        "input_workers": getattr(watcher.loader, "_num_workers", 0),
    }


def ddp_record(ddp: Any) -> dict[str, Any]:
    """Return what a DDP model was given, and what it logs: a ``dpsim.torch.script.watched.DdpRecord``."""
    logged = ddp._get_ddp_logging_data()
    return {
        "torch": str(torch.__version__),
        "device": ddp.device_type,
        "parameters": list(ddp_parameters(ddp)),
        "rebuilt": logged.get("rebuilt_per_bucket_param_indices", ""),
        "initial_bucket_bytes": logged["bucket_sizes"],
        "communication_hook": logged.get("comm_hook", ""),
        "bucket_cap_bytes": None if ddp.bucket_bytes_cap_default else int(ddp.bucket_bytes_cap),
        "bucket_caps_bytes": list(getattr(ddp, "bucket_bytes_cap_list", ())),
        "find_unused_parameters": bool(ddp.find_unused_parameters),
        "static_graph": bool(ddp.static_graph),
        "joins": bool(ddp._join_config.enable),
        "state_bytes": state_bytes(ddp),
    }


def _units_record(root: Any) -> dict[str, Any]:
    """Return of a model that ``fully_shard`` has sharded what a job's record needs: its units as DDP's buckets."""
    sizes = [str(root.unit_bytes(group)) for group in reversed(root.groups)]
    return {
        "torch": str(torch.__version__),
        "device": root.device_type,
        "parameters": [],
        "rebuilt": "",
        "initial_bucket_bytes": ",".join(sizes),
        "communication_hook": "",
        "bucket_cap_bytes": None,
        "bucket_caps_bytes": [],
        "find_unused_parameters": False,
        "static_graph": False,
        "joins": False,
        "state_bytes": state_bytes(root),
        "units": len(sizes),
    }


def identity(model: Any, optimizer: Any) -> dict[str, str]:
    """Return what tells a training from others, whatever its paths and versions are.

    These are a digest of the names, shapes and types of the parameters that are trained, in their order; the
    optimizer's class with the arrays that it keeps of each; and the model of the GPU.
    """
    left_out = getattr(model, "parameters_to_ignore", ())
    parameters = [
        f"{name} {tuple(each.shape)} {type_name(each.dtype)}"
        for name, each in model.module.named_parameters()
        if each.requires_grad and name not in left_out
    ]
    inner = getattr(optimizer, "optim", optimizer)  # of a ZeroRedundancyOptimizer
    state = getattr(inner, "state", {}).values()
    arrays = {name for kept in state for name, each in kept.items() if isinstance(each, torch.Tensor) and each.dim()}
    on_gpu = model.device_type == "cuda"
    return {
        "parameters_sha256": hashlib.sha256("\n".join(parameters).encode()).hexdigest(),
        "optimizer": "" if inner is None else f"{type(inner).__name__}({', '.join(sorted(map(str, arrays)))})",
        "device_name": torch.cuda.get_device_name() if on_gpu else "",
    }


def state_bytes(model: Any) -> int:
    """The bytes of what a model does not train: buffers, such as running statistics, and (shards of) parameters."""
    frozen = [each for each in model.module.parameters() if not each.requires_grad]
    own = [each.to_local() if hasattr(each, "to_local") else each for each in (*model.module.buffers(), *frozen)]
    return sum(each.numel() * each.element_size() for each in own)


def _run() -> str:
    """What the ranks of one attempt of a job have in common, as torchrun or the job itself tells them."""
    named = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    return f"{address if named == 'none' else named} attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def type_name(dtype: Any) -> str:
    """The name of a type of PyTorch as NumPy has it."""
    return str(dtype).removeprefix("torch.")


def optimizer_slots(optimizer: Any, module: Any) -> int | None:
    """Arrays of a parameter's size in bytes that the optimizer keeps for one; None where no optimizer was seen.

    Copies in float32 that it updates in place of a module's parameters in 16 bits are among them.
    """
    if optimizer is None:
        return None
    own = {id(parameter): parameter.element_size() for parameter in module.parameters()}
    slots = 0
    for parameter, kept in optimizer.state.items():
        arrays = [each for each in kept.values() if isinstance(each, torch.Tensor) and each.shape == parameter.shape]
        item_bytes = own.get(id(parameter), min((parameter.element_size(), *own.values())))
        arrays += [parameter] if item_bytes < parameter.element_size() else []
        if parameter.dim():
            slots = max(slots, -(-sum(each.element_size() for each in arrays) // item_bytes))
    return slots


def ddp_parameters(ddp: Any) -> Iterator[dict[str, Any]]:
    """Yield what there is to know of each parameter that DDP reduces, in the order of its positions."""
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    for name, parameter in ddp.module.named_parameters():
        if not parameter.requires_grad or name in ddp.parameters_to_ignore:
            continue
        module = name.rpartition(".")[0]
        owner = ddp.module.get_submodule(module)
        normalises = isinstance(owner, torch.nn.modules.batchnorm._BatchNorm)
        yield {
            "name": name,
            "module": module,
            "shape": tuple(parameter.shape),
            "dtype": type_name(parameter.dtype),
            "batch_norm_channels": owner.num_features if normalises else 0,
            "size_bytes": parameter.numel() * parameter.element_size(),
            "device": str(parameter.device),
            "sparse": isinstance(owner, embeddings) and bool(owner.sparse),
        }
