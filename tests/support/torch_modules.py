"""PyTorch modules of the tests of ``TorchReplica``, for samples [4, 4, 1] in 3 classes. Loads torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SHAPE, CLASSES = (4, 4, 1), 3


def dense() -> Any:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def dropout() -> Any:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def frozen() -> Any:
    module = dense()
    module[1].weight.requires_grad_(False)
    return module


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.output = nn.Linear(48, CLASSES)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.convolution(x.permute(0, 3, 1, 2))))
        return self.output(x.flatten(1))


class Tied(nn.Module):
    """The second and the third layer have one weight, and the output is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(6, CLASSES)
        self.first, self.second, self.third = nn.Linear(16, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.third.weight = self.second.weight

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.first(x.flatten(1)))
        return self.output(torch.tanh(self.third(torch.tanh(self.second(x)))))


class Unused(nn.Module):
    """A layer and a bias that no step uses, and a parameter of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.hidden, self.spare, self.output = nn.Linear(16, 6), nn.Linear(2, 2), nn.Linear(6, CLASSES)

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.hidden(x.flatten(1) * self.scale))
        return nn.functional.linear(x, self.output.weight)


MODULES = {
    "dense": dense,
    "dropout": dropout,
    "frozen": frozen,
    "normalised": Normalised,
    "tied": Tied,
    "unused": Unused,
}
