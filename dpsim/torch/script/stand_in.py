"""The script with which ``dpsim calibrate --algorithm gloo`` measures: 30 MiB of gradients, in layers of many sizes.

``stand_in.py DIVISOR`` has layers whose widths are divided by this, for a network on which 30 MiB take long.
"""

from __future__ import annotations

import itertools
import sys

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

WIDTHS = (1024, 16, 1024, 256, 1024, 1024, 1024, 1024, 2048, 1024)
SAMPLES = 8


def main() -> None:
    """Train until dpsim ends it."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    widths = [width // int(sys.argv[1]) for width in WIDTHS]
    model = torch.nn.Sequential(*[torch.nn.Linear(*pair) for pair in itertools.pairwise(widths)])
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    samples = torch.randn(SAMPLES, widths[0])
    while True:
        optimizer.zero_grad()
        ddp(samples).pow(2).mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
