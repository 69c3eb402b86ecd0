"""Ranks of gloo that train by DDP or FSDP: their gradients, and whether the orders of sums give these. Loads torch.

Its arguments: the number of ranks, a folder, and a JSON list of runs; rank 0 writes ``outcomes.json`` there. The ranks
are forks of this process, so that PyTorch is imported once.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rank_sums import evaluated
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch_architectures import ARCHITECTURES, random_network

from dpsim import codec
from dpsim.torch.ddp_bits import ReducedGradient, gradient_expressions, step_buckets
from dpsim.torch.script.probe.parameters import reduced_parameters
from dpsim.torch.script.probe.rank_record import ddp_record
from dpsim.torch.script.script_record import DdpRecord

STEPS = 3


def loss(module: Any, batch: tuple[Any, ...]) -> Any:
    return module(*batch).float().square().mean()


def local_gradients(module: Any, batch: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """The gradients of this rank alone, by a copy of the module."""
    alone = copy.deepcopy(module)
    alone.zero_grad()
    loss(alone, batch).backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in alone.named_parameters()
    }


def of_ranks(tensor: torch.Tensor) -> list[NDArray[Any]]:
    """The values of all ranks."""
    values = [torch.empty(tensor.numel()) for _ in range(distributed.get_world_size())]
    distributed.all_gather(values, tensor.flatten())
    return [value.numpy() for value in values]


def built(architecture: str | int) -> tuple[Any, tuple[Any, ...]]:
    """A model that all ranks build alike, and a batch of this rank's own; a number is that of a random network."""
    build = (
        functools.partial(random_network, architecture)
        if isinstance(architecture, int)
        else ARCHITECTURES[architecture]
    )
    torch.manual_seed(1 + distributed.get_rank())
    batch = build()[1]
    torch.manual_seed(0)
    return build()[0], batch


def replicated(
    architecture: str | int, options: dict[str, Any], *, half: bool = False, check: bool = True
) -> dict[str, Any]:
    """By DDP, of every step: the digests of the gradients by name, and those whose bits their orders do not give."""
    module, batch = built(architecture)
    ddp = DistributedDataParallel(module, **options)
    if half:
        ddp.register_comm_hook(None, fp16_compress_hook)
    reduced = dict(reduced_parameters(ddp))
    record = codec.convert(ddp_record(ddp), DdpRecord)
    gradients = [
        ReducedGradient(name=name, elements=reduced[name].numel(), parameter=parameter)
        for name, parameter in zip(reduced, record.ddp_parameters, strict=True)
    ]
    order: list[int] = []
    for index, parameter in enumerate(reduced.values()):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
    optimizer = torch.optim.SGD(reduced.values(), 1e-3)
    steps, wrong = [], []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        local = local_gradients(module, batch) if check else {}
        order.clear()
        loss(ddp, batch).backward()
        steps.append({name: digest(parameter.grad) for name, parameter in reduced.items()})
        if check:
            buckets = step_buckets(gradients, order, record.options, step)
            expressions = gradient_expressions(gradients, buckets, distributed.get_world_size(), 2 if half else None)
            for (name, parameter), ranges in zip(reduced.items(), expressions, strict=True):
                total = evaluated(ranges, [as_sent(values, half=half) for values in of_ranks(local[name])])
                if parameter.grad is not None and not same_bits(parameter.grad, total):
                    wrong.append(f"step {step}, {name}")
        optimizer.step()
    return {
        "gradients": codec.to_builtins(gradients),
        "options": codec.to_builtins(record.options),
        "order": order,
        "steps": steps,
        "wrong": wrong,
    }


def as_sent(values: NDArray[Any], *, half: bool) -> NDArray[Any]:
    """What DDP adds: it multiplies by the reciprocal of the number of ranks; the hook rounds first, and divides."""
    size = distributed.get_world_size()
    return values.astype(np.float16) / np.float16(size) if half else values * np.float32(1 / size)


def same_bits(tensor: torch.Tensor, total: NDArray[Any]) -> bool:
    bits: bytes = tensor.contiguous().numpy().tobytes()
    return bits == total.astype(np.float32).tobytes()


def digest(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return ""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def run_rank(rank: int, size: int, folder: Path, runs: list[dict[str, Any]]) -> None:
    store = distributed.FileStore(str(folder / "store"), size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    outcomes = [replicated(**run) for run in runs]
    if rank == 0:
        (folder / "outcomes.json").write_text(json.dumps(outcomes))
    distributed.destroy_process_group()


def main(size: int, folder: Path, runs: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(rank, size, folder, runs)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
