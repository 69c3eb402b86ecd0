"""A rank that trains from the same parameters by accumulating by hand, and with one batch an update, ``accumulate``d.

``python accumulating.py STORE RANK RANKS MICRO_BATCHES ddp|fsdp`` prints whether the parameters are equal to rounding.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dpsim.torch.script.probe.accumulated import accumulate
from dpsim.torch.script.probe.fsdp import watch

UPDATES = 4


def wrapped():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = fully_shard(model) if SHARDED else DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def by_hand(batches, micro_batches):
    model, optimizer = wrapped()
    for number, batch in enumerate(batches, 1):
        last = number % micro_batches == 0
        if SHARDED:
            model.set_requires_gradient_sync(last)
        else:
            model.require_backward_grad_sync = last
        (model(batch).square().mean() / micro_batches).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return parameters_of(model)


def one_batch_an_update(batches):
    model, optimizer = wrapped()
    for batch in batches:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return parameters_of(model)


def parameters_of(model):
    return [each.full_tensor() if SHARDED else each for each in model.parameters()]


if __name__ == "__main__":
    store, rank, ranks, micro_batches = sys.argv[1], *map(int, sys.argv[2:5])
    SHARDED = sys.argv[5] == "fsdp"
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    torch.manual_seed(1 + rank)
    batches = torch.randn(UPDATES * micro_batches, 4, 8)
    wanted, without = by_hand(batches, micro_batches), one_batch_an_update(batches)
    watch(lambda forward, model, *inputs: forward(model, *inputs))
    accumulate(micro_batches)
    pairs = list(zip(one_batch_an_update(batches), wanted, strict=True))
    same = all(torch.allclose(got, expected, rtol=1e-6, atol=1e-8) for got, expected in pairs)
    other = not any(torch.allclose(got, expected) for got, expected in zip(without, wanted, strict=True))
    print("equal" if same and other else f"differ: {pairs}")
    dist.destroy_process_group()
