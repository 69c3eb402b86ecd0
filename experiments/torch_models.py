"""Three PyTorch models of some ten million parameters, each with a batch of random samples. Loads torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Built = tuple[nn.Module, torch.Tensor, torch.Tensor]
"""A module, inputs [b, ...] and labels [b, ...]."""
_CLASSES, _TOKENS, _LENGTH = 10, 65, 64


def mlp(batch: int) -> Built:
    widths = (1024, 1536, 2048, 1536, 1024, 512)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return (
        nn.Sequential(*layers, nn.Linear(widths[-1], _CLASSES)),
        torch.randn(batch, widths[0]),
        torch.randint(0, _CLASSES, (batch,)),
    )


class Residual(nn.Module):  # type: ignore[misc]
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Any) -> Any:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet18(batch: int) -> Built:
    """ResNet-18 as it is used on CIFAR's pictures of 32 x 32: a first convolution of 3x3, and no pooling behind it."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, _CLASSES)]
    return nn.Sequential(*layers), torch.randn(batch, 3, 32, 32), torch.randint(0, _CLASSES, (batch,))


class Gpt(nn.Module):  # type: ignore[misc]
    """A decoder for characters: tokens [b, length] -> scores [b, tokens, length], as the cross-entropy takes them."""

    def __init__(self, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, width)
        self.position = nn.Parameter(torch.zeros(_LENGTH, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, _TOKENS, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(_LENGTH))

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.output(self.norm(x)).transpose(1, 2)


def gpt(batch: int) -> Built:
    tokens = torch.randint(0, _TOKENS, (batch, _LENGTH + 1))
    return Gpt(), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


MODELS: dict[str, Callable[[int], Built]] = {"mlp": mlp, "resnet18": resnet18, "gpt": gpt}
