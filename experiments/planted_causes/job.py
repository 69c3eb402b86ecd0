"""An ordinary DDP training whose slowness is planted: torchrun --nproc-per-node 2 job.py --slow-rank 1 --sleep 0.2"""

import argparse
import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WARM_UP = 4


class Samples(Dataset[tuple[torch.Tensor, int]]):  # type: ignore[misc]
    """Random vectors, or sequences of them, each of which takes a while to load."""

    def __init__(self, shape: tuple[int, ...], load_s: float) -> None:
        self._values, self._load_s = torch.randn(4096, *shape), load_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._load_s:
            time.sleep(self._load_s)
        return self._values[index % len(self._values)], index % 10


class Perceptron(nn.Module):  # type: ignore[misc]
    """Linear layers of one width."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        hidden = [each for _ in range(layers) for each in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output


class Recurrent(nn.Module):  # type: ignore[misc]
    """A recurrent cell over a sequence, whose many small products take as long for one sample as for some."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], x.shape[2])
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        output: torch.Tensor = self.head(state)
        return output


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=1536)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequence", type=int, default=0, help="steps of a recurrent model (0: a perceptron)")
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds that the slow rank sleeps in a step")
    parser.add_argument("--count", type=int, default=0, help="end after so many steps, and print their mean seconds")
    parser.add_argument("--load", type=float, default=0.0, help="seconds that a batch takes to load, beside the data")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width, length = arguments.width, arguments.sequence
    model = Recurrent(width) if length else Perceptron(width, arguments.layers)
    ddp = DistributedDataParallel(model, bucket_cap_mb=arguments.bucket_cap_mb)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    data = Samples((length, width) if length else (width,), arguments.load / arguments.batch_size)
    ended_s = []
    for x, y in DataLoader(data, batch_size=arguments.batch_size):
        if dist.get_rank() == arguments.slow_rank:
            time.sleep(arguments.sleep)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        ended_s.append(time.perf_counter())
        if arguments.count and len(ended_s) == arguments.count + WARM_UP:
            if dist.get_rank() == 0:
                print(json.dumps((ended_s[-1] - ended_s[WARM_UP - 1]) / arguments.count))
            break


if __name__ == "__main__":
    main()
