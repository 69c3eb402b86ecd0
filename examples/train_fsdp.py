"""Trains a residual network on synthetic data with PyTorch's FSDP: torchrun --nproc-per-node 2 train_fsdp.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
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
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Network(arguments.width, arguments.blocks)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    samples = torch.randn(8192, 256)
    labels = samples[:, :10].argmax(dim=1)
    data = TensorDataset(samples, labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=arguments.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
