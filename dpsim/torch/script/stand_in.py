"""The script with which ``dpsim calibrate --algorithm gloo`` measures: 30 MiB of gradients, in layers of many sizes."""

from __future__ import annotations

import itertools

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

WIDTHS = (1024, 16, 1024, 256, 1024, 1024, 1024, 1024, 2048, 1024)
SAMPLES = 8


def main() -> None:
    """Train until dpsim ends it."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    model = torch.nn.Sequential(*[torch.nn.Linear(*widths) for widths in itertools.pairwise(WIDTHS)])
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    samples = torch.randn(SAMPLES, WIDTHS[0])
    while True:
        optimizer.zero_grad()
        ddp(samples).pow(2).mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
