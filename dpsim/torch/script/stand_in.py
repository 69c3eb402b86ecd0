"""The script with which ``dpsim calibrate --algorithm gloo`` measures gloo's allreduces: 32 MiB of gradients."""

from __future__ import annotations

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, SAMPLES = 8, 1024, 8


def main() -> None:
    """Train until dpsim ends it."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    samples = torch.randn(SAMPLES, WIDTH)
    while True:
        optimizer.zero_grad()
        ddp(samples).pow(2).mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
