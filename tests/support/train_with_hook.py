"""One rank, not started by MPI: trains by DDP with gloo and with dpsim's hook, and writes the gradients of both.

Its arguments: rank, size, the file to meet in, what to do, the file for the outcome.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import dpsim.torch
from dpsim.torch import node
from dpsim.torch.hook import Fastest

BATCH = 6


class Branches(nn.Module):
    """A model of which every other step leaves a part out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(7, 300), nn.Linear(300, 300), nn.Linear(300, 300)
        self.last = nn.Linear(300, 5)
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        middle = self.left if self.calls % 2 else self.right
        return self.last(middle(self.first(x).relu()).relu())


def gradients(
    hook: Callable[..., Any] | None,
    *,
    dtype: torch.dtype = torch.float32,
    unused: bool = False,
    accumulate: int = 1,
    steps: int = 4,
    models: int = 1,
    **options: Any,
) -> list[torch.Tensor]:
    """The gradients of every step; each begins from the same parameters, so that rounding does not grow."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    made = []
    for _ in range(models):
        layers = Branches() if unused else nn.Sequential(nn.Linear(7, 300), nn.ReLU(), nn.Linear(300, 301), nn.ReLU())
        ddp = DistributedDataParallel(layers.to(dtype), bucket_cap_mb=0.2, find_unused_parameters=unused, **options)
        if hook is not None:
            ddp.register_comm_hook(None, hook())
        made.append(ddp)
    random = torch.Generator().manual_seed(100 + rank)
    found = []
    for _ in range(steps):
        for part in range(accumulate):
            loss: Any = 0
            with contextlib.ExitStack() as local:
                for ddp in made:
                    if part < accumulate - 1:
                        local.enter_context(ddp.no_sync())
                    loss = loss + ddp(torch.randn(BATCH, 7, generator=random).to(dtype)).square().mean()
                loss.backward()
        for parameter in (parameter for ddp in made for parameter in ddp.parameters()):
            found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
            parameter.grad = None if not options.get("gradient_as_bucket_view") else parameter.grad.zero_()
    return found


def worst(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, over the largest number of the same tensor."""
    pairs = [(a.double(), b.double()) for a, b in zip(mine, theirs, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "gradients as views": {"gradient_as_bucket_view": True},
    "unused parameters": {"unused": True},
    "accumulation": {"accumulate": 3},
    "two models": {"models": 2},
    "static graph": {"static_graph": True},
}


def compare() -> dict[str, Any]:
    """How far the hook's gradients are from gloo's, for every case and overlap."""
    outcome: dict[str, Any] = {}
    for name, case in CASES.items():
        expected = gradients(None, **case)
        for overlap in ("inline", "thread", "auto", "gloo"):
            hook = lambda overlap=overlap: dpsim.torch.allreduce_hook(overlap=overlap)  # noqa: E731
            outcome[f"{name}, {overlap}"] = worst(gradients(hook, **case), expected)
    node._TMPFS = "/no such folder"
    outcome["no room in /dev/shm"] = worst(
        gradients(lambda: dpsim.torch.allreduce_hook(overlap="inline")), gradients(None)
    )
    return outcome


def rounded() -> dict[str, Any]:
    """How far gradients of 16 bits on the wire are from gloo's in float32."""
    hooks = {wire: lambda wire=wire: dpsim.torch.allreduce_hook(wire_dtype=wire) for wire in ("bfloat16", "float16")}
    return {wire: worst(gradients(hook), gradients(None)) for wire, hook in hooks.items()}


def decided() -> dict[str, Any]:
    """The ways of 80 steps, and how often a step was timed for each."""
    ways = []
    ended = Fastest.step_ended

    def step_ended(self: Fastest) -> None:
        ways.append(self.way)
        ended(self)

    Fastest.step_ended = step_ended  # type: ignore[method-assign]
    gradients(dpsim.torch.allreduce_hook, steps=80)
    return {"ways": ways}


def killed() -> dict[str, Any]:
    """Rank 1 ends in its third step, without a word."""
    if distributed.get_rank() == 1:

        def hook() -> Callable[..., Any]:
            reduce, calls = dpsim.torch.allreduce_hook(overlap="inline"), []

            def ends(state: Any, bucket):  # type: ignore[no-untyped-def]
                calls.append(bucket.index())
                if calls.count(0) == 3:
                    os._exit(9)
                return reduce(state, bucket)

            return ends
    else:
        hook = lambda: dpsim.torch.allreduce_hook(overlap="inline")  # noqa: E731
    gradients(hook)
    return {}


def joined() -> dict[str, Any]:
    """Rank 1 has a batch less than rank 0."""
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    ddp.register_comm_hook(None, dpsim.torch.allreduce_hook(overlap="inline"))
    with ddp.join():
        for _ in range(4 - distributed.get_rank()):
            ddp(torch.randn(5, 3)).sum().backward()
    return {}


def sparse() -> dict[str, Any]:
    """An embedding's sparse gradients beside dense ones."""
    found = []
    for hook in (None, dpsim.torch.allreduce_hook()):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(
            nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, 2)), bucket_cap_mb=1e-4
        )
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        ddp(torch.randint(0, 20, (5, 3))).sum().backward()
        found.append([parameter.grad.to_dense() for parameter in ddp.parameters()])
    return {"difference": worst(*found)}


def main() -> None:
    rank, size, store, what, output = sys.argv[1:]
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size))
    outcome = globals()[what]()
    Path(output).write_text(json.dumps(outcome | {"mpi": "mpi4py.MPI" in sys.modules}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
