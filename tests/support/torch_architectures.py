"""Small models of eight architectures in PyTorch, each with a batch, to compare DDP's buckets on. Loads torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]


def mlp() -> Built:
    layers: list[nn.Module] = []
    for inputs, outputs in ((512, 1024), (1024, 1024), (1024, 1024), (1024, 10)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers), (torch.randn(4, 512),)


class Block(nn.Module):
    """A residual block: ``basic`` of two 3x3 convolutions, otherwise a bottleneck; its shortcut is defined last."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, *, basic: bool) -> None:
        super().__init__()
        shape = ((width, 3, stride), (outputs, 3, 1)) if basic else ((width, 1, 1), (width, 3, stride), (outputs, 1, 1))
        body: list[nn.Module] = []
        channels = inputs
        for next_channels, size, step in shape:
            body += [
                nn.Conv2d(channels, next_channels, size, step, size // 2, bias=False),
                nn.BatchNorm2d(next_channels),
            ]
            body += [nn.ReLU()]
            channels = next_channels
        self.body = nn.Sequential(*body[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Any) -> Any:
        return functional.relu(self.body(x) + self.shortcut(x))


def _resnet(depths: tuple[int, ...], width: int, expansion: int) -> Built:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage, depth in enumerate(depths):
        for number in range(depth):
            narrow = width * 2**stage
            stride = 2 if stage and not number else 1
            layers.append(Block(channels, narrow, narrow * expansion, stride, basic=expansion == 1))
            channels = narrow * expansion
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100)]
    return nn.Sequential(*layers), (torch.randn(2, 3, 16, 16),)


def resnet18() -> Built:
    return _resnet((2, 2, 2, 2), 32, 1)


def resnet50() -> Built:
    return _resnet((3, 4, 6, 3), 16, 4)


def vgg() -> Built:
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, "pool", 32, "pool", 64, 64, "pool", 128, 128, "pool"):
        if width == "pool":
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, int(width), 3, padding=1), nn.ReLU()]
        channels = int(width)
    layers += [nn.Flatten(), nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 100)]
    return nn.Sequential(*layers), (torch.randn(2, 3, 32, 32),)


class Gpt(nn.Module):
    """A transformer for tokens, whose embedding is its output layer too."""

    def __init__(self, tokens: int = 2000, width: int = 128, depth: int = 4, length: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, tokens, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def gpt() -> Built:
    return Gpt(), (torch.randint(0, 2000, (2, 16)),)


class Vit(nn.Module):
    """A vision transformer with a class token."""

    def __init__(self, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, 17, width))
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 3, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth))
        )
        self.head = nn.Linear(width, 10)

    def forward(self, pictures: Any) -> Any:
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.blocks(x)[:, 0])


def vit() -> Built:
    return Vit(), (torch.randn(2, 3, 16, 16),)


class WithUnused(nn.Module):
    """Layers of which every other one takes no part in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(7))

    def forward(self, x: Any) -> Any:
        for layer in list(self.layers)[::2]:
            x = layer(x).relu()
        return x


def unused() -> Built:
    return WithUnused(), (torch.randn(2, 600),)


class Mixed(nn.Module):
    """Layers of four dtypes by turns."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
        self.layers = nn.ModuleList(nn.Linear(500, 500, dtype=dtypes[number % 4]) for number in range(11))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).relu()
        return x


def mixed() -> Built:
    return Mixed(), (torch.randn(2, 500),)


ARCHITECTURES: dict[str, Callable[[], Built]] = {
    build.__name__: build for build in (mlp, resnet18, resnet50, vgg, gpt, vit, unused, mixed)
}


def random_network(seed: int) -> Built:
    """A small network of random widths, with and without biases and layer norms."""
    choose = random.Random(seed)
    widths = [choose.choice([3, 7, 16, 33, 64, 100, 129]) for _ in range(choose.randint(4, 10))]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers.append(nn.Linear(inputs, outputs, bias=choose.random() < 0.7))
        layers.append(choose.choice([nn.Tanh(), nn.LayerNorm(outputs)]))
    return nn.Sequential(*layers), (torch.randn(5, widths[0]),)
