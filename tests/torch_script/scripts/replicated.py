"""A script whose model two groups of ranks shard by ``fully_shard`` each, which prints the collectives of its steps.

``python replicated.py MICRO_BATCHES each|gradients|all_reduce bfloat16|float32 [STORE RANK RANKS]`` accumulates and
reduces in each micro-batch, defers reducing, or defers the sums over the groups alone. With a store it is a rank of
gloo's that ends after two steps; without, it trains on as a rank of whoever started it.
"""

import itertools
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

CALLED = []


def log(kind, name, whole):
    original = getattr(dist, name)

    def logged(*arguments, **keywords):
        tensor = keywords.get(whole, arguments[0] if arguments else None)
        ranks = dist.get_process_group_ranks(keywords["group"])
        CALLED.append((kind, tensor.numel() * tensor.element_size(), ranks))
        return original(*arguments, **keywords)

    setattr(dist, name, logged)


micro_batches, deferred, dtype, *meeting = sys.argv[1:]
if meeting:
    store, rank, ranks = meeting[0], *map(int, meeting[1:])
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
else:
    dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 33), nn.Linear(33, 7), nn.Linear(7, 16), nn.Linear(16, 5))
given = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(getattr(torch, dtype), torch.float32)}
fully_shard(model[1], reshard_after_forward=False, **given)
fully_shard(model[2], **given)
fully_shard(model, **given)
optimizer = torch.optim.AdamW(model.parameters())
for kind, name, whole in (
    ("all-gather", "all_gather_single", "output_tensor"),
    ("reduce-scatter", "reduce_scatter_single", "input"),
    ("allreduce", "all_reduce", "tensor"),
):
    log(kind, name, whole)
for step in itertools.count():
    CALLED.clear()
    for number in range(int(micro_batches)):
        last = number == int(micro_batches) - 1
        model.set_requires_gradient_sync(last or deferred != "gradients")
        model.set_requires_all_reduce(last or deferred != "all_reduce")
        model(torch.randn(4, 16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if meeting and step:
        print(json.dumps(CALLED))
        break
dist.destroy_process_group()
