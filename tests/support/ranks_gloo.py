"""One gloo rank that MPI did not start: its DDP gradients, and those that the expressions of ranks give. Loads torch.

Its arguments: rank, size, the file to meet in, a JSON list of runs, the file for the outcome.
"""

from __future__ import annotations

import copy
import hashlib
import json
import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch_architectures import ARCHITECTURES

from dpsim import codec
from dpsim.kernels.allreduce.tree import fold
from dpsim.torch.ddp_bits import Ranges, ReducedGradient, gradient_expressions, step_buckets
from dpsim.torch.script.probe.parameters import reduced_parameters
from dpsim.torch.script.probe.rank_record import ddp_record
from dpsim.torch.script.script_record import DdpRecord

STEPS = 4


def evaluated(ranges: Ranges, values: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The sums of the ranks' values, each range of elements in its order, rounded as NumPy adds."""
    total, start = np.empty_like(values[0]), 0
    for end, expression in ranges:
        total[start:end] = fold(expression, lambda rank, part=slice(start, end): values[rank][part], operator.add)
        start = end
    return total


def local_gradients(module: Any, batch: tuple[Any, ...], names: Sequence[str]) -> list[torch.Tensor]:
    """The gradients of this rank alone, by a copy of the module."""
    alone = copy.deepcopy(module)
    alone.zero_grad()
    loss(alone, batch).backward()
    parameters = dict(alone.named_parameters())
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in (parameters[name] for name in names)]


def loss(module: Any, batch: tuple[Any, ...]) -> Any:
    return module(*batch).float().square().mean()


def of_ranks(tensor: torch.Tensor) -> list[NDArray[Any]]:
    """The values of all ranks."""
    values = [torch.empty(tensor.numel()) for _ in range(distributed.get_world_size())]
    distributed.all_gather(values, tensor.flatten())
    return [value.numpy() for value in values]


def own_batch(architecture: str) -> tuple[Any, ...]:
    torch.manual_seed(1 + distributed.get_rank())
    return ARCHITECTURES[architecture]()[1]


def trained(architecture: str, options: dict[str, Any], *, expressions: bool) -> dict[str, Any]:
    """Of every step: the digests of the gradients by name, and those whose bits their expressions do not give."""
    size = distributed.get_world_size()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(ARCHITECTURES[architecture]()[0], **options)
    batch = own_batch(architecture)
    reduced = reduced_parameters(ddp)
    names, parameters = [name for name, _ in reduced], [parameter for _, parameter in reduced]
    record = codec.convert(ddp_record(ddp), DdpRecord)
    gradients = [
        ReducedGradient(name=name, elements=parameter.numel(), parameter=each)
        for (name, parameter), each in zip(reduced, record.ddp_parameters, strict=True)
    ]
    order: list[int] = []
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
    optimizer = torch.optim.SGD(parameters, 1e-3)
    steps, wrong = [], []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        local = local_gradients(ddp.module, batch, names) if expressions else []
        order.clear()
        loss(ddp, batch).backward()
        steps.append({name: digest(parameter.grad) for name, parameter in zip(names, parameters, strict=True)})
        if expressions:
            buckets = step_buckets(gradients, order, record.options, step)
            ranges = gradient_expressions(gradients, buckets, size)
            for name, parameter, own, each in zip(names, parameters, local, ranges, strict=True):
                # DDP multiplies by the reciprocal as it copies a gradient into its bucket
                values = [value * np.float32(1 / size) for value in of_ranks(own)]
                if parameter.grad is not None and evaluated(each, values).tobytes() != parameter.grad.numpy().tobytes():
                    wrong.append(f"step {step}, {name}")
        optimizer.step()
    return {"gradients": codec.to_builtins(gradients), "order": order, "options": codec.to_builtins(record.options),
            "steps": steps, "wrong": wrong}


def digest(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return ""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def main(rank: int, size: int, store: str, runs: str, outcome: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", store=distributed.FileStore(store, size), rank=rank, world_size=size)
    outcomes = [trained(architecture, options, expressions=check) for architecture, options, check in json.loads(runs)]
    if rank == 0:
        Path(outcome).write_text(json.dumps(outcomes))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
