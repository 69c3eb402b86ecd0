"""Trains a perceptron on synthetic data with PyTorch's DDP: torchrun --nproc-per-node 2 train_ddp.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a step on each rank")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(256, arguments.width), nn.ReLU()]
    for _ in range(arguments.layers):
        layers += [nn.Linear(arguments.width, arguments.width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(arguments.width, 10))
    model = DistributedDataParallel(model, bucket_cap_mb=arguments.bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

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
