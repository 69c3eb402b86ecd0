"""An ordinary script that trains one of three models with DDP over gloo, on batches from memory. Loads torch.

With ``--measured FILE`` rank 0 writes when each gradient was final: for every step after the first few, seconds from
the start of its backward by the names of parameters.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

WARM_UP_STEPS = 5


def mlp() -> tuple[Any, Any]:
    """Return 20 dense layers of width 512."""
    layers = [layer for _ in range(20) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(64, 512)


def cnn() -> tuple[Any, Any]:
    """Return eight convolutions with batch norms, 32 to 256 channels."""
    layers: list[Any] = []
    channels = 3
    for number in range(8):
        width = 32 * 2 ** (number // 2)
        layers += [nn.Conv2d(channels, width, 3, stride=1 + number % 2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * channels, 10)), torch.randn(32, 3, 32, 32)


def transformer() -> tuple[Any, Any]:
    """Return four encoder layers of width 256 over 64 tokens out of 4000."""
    blocks = [nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(nn.Embedding(4000, 256), *blocks, nn.Linear(256, 4000)), torch.randint(0, 4000, (8, 64))


MODELS = {build.__name__: build for build in (mlp, cnn, transformer)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--measured", type=Path)
    options = parser.parse_args()
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model, batch = MODELS[options.model]()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=0.9)
    ready_s: dict[str, float] = {}

    def final(name: str, _: Any) -> None:
        ready_s[name] = time.perf_counter()

    if options.measured:
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(functools.partial(final, name))
    steps = []
    for _ in range(options.steps if options.measured else 10**6):
        optimizer.zero_grad()
        loss = ddp(batch).square().mean()
        began_s = time.perf_counter()
        loss.backward()
        steps.append({name: final_s - began_s for name, final_s in ready_s.items()})
        optimizer.step()
    if options.measured and distributed.get_rank() == 0:
        options.measured.write_text(json.dumps(steps[WARM_UP_STEPS:]))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
