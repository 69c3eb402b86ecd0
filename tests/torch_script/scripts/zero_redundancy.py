"""One step of a script with ``ZeroRedundancyOptimizer`` on a gloo rank: the bytes and the source of each broadcast.

Arguments: rank, world size, a file for the ranks to meet at.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 3))
)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
nn.functional.cross_entropy(model(torch.randn(8, 30)), torch.randint(0, 3, (8,))).backward()

calls = []
broadcast = distributed.broadcast


def recorded(tensor: torch.Tensor, src: int, group: object = None, async_op: bool = False) -> object:
    calls.append((src, tensor.numel() * tensor.element_size(), async_op))
    return broadcast(tensor, src, group=group, async_op=async_op)


distributed.broadcast = recorded
optimizer.step()
print(json.dumps(calls))
distributed.destroy_process_group()
