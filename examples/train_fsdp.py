"""Trains a residual network on synthetic data with PyTorch's FSDP: torchrun --nproc-per-node 2 train_fsdp.py

On GPUs by NCCL where PyTorch sees one for each rank of this machine, else on processors by gloo.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.relu(self.widen(self.norm(x))))


class Network(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.enter = nn.Linear(256, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.leave = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step on each rank")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--bfloat16", action="store_true", help="compute and gather in bfloat16, reduce in float32")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--defer", action="store_true", help="reduce in the last micro-batch alone")
    arguments = parser.parse_args()

    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if local_rank < torch.cuda.device_count() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy()
    if arguments.bfloat16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Network(arguments.width, arguments.blocks).to(device)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    samples = torch.randn(8192, 256)
    labels = samples[:, :10].argmax(dim=1)
    data = TensorDataset(samples, labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=arguments.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, start=1):
            last = number % arguments.accumulate == 0
            model.set_requires_gradient_sync(last or not arguments.defer)
            loss = nn.functional.cross_entropy(model(x.to(device)).float(), y.to(device)) / arguments.accumulate
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
