"""The models in PyTorch, with dpsim's initial weights. Imported on ranks only: this module loads torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dpsim.experiments.peers.agreement import match, to_torch
from dpsim.experiments.peers.setting import CLASSES, Work
from dpsim.nn import build_model


def build(work: Work) -> tuple[Any, dict[str, str]]:
    """Return the work's model with dpsim's initial weights, and dpsim's tensor name of each of its parameters."""
    network = build_model(work.token, work.shape, CLASSES)
    tensors = [tensor for layer in network.layers for tensor in layer.tensors]
    model = (
        resnet20(work.shape[-1])
        if work.kind == "resnet20"
        else mlp([tensors[0].shape[0], *(t.shape[1] for t in tensors if len(t.shape) == 2)])
    )
    ours = {tensor.name: tensor.shape for tensor in tensors}
    names = match(ours, {name: tuple(value.shape) for name, value in model.named_parameters()})
    values = network.initial_parameters(work.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(to_torch(values[names[name]])))
    return model, names


def mlp(widths: Sequence[int]) -> Any:
    """Return linear layers of these widths, the inputs' first, with a rectifier between them."""
    layers: list[Any] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def resnet20(channels: int) -> Any:
    """Return ResNet-20 of He et al. (arXiv:1512.03385, section 4.2) for 32 x 32 pictures, with shortcuts of kind A."""
    layers: list[Any] = [*_conv_bn(channels, 16, 1), nn.ReLU(inplace=True)]
    inputs = 16
    for outputs in (16, 32, 64):
        for block in range(3):
            layers.append(_Block(inputs, outputs, 2 if block == 0 and outputs != inputs else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def _conv_bn(inputs: int, outputs: int, stride: int) -> tuple[Any, Any]:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(outputs)


class _Block(nn.Module):  # type: ignore[misc]
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)); the shortcut has no weights.

    Where the channels double it takes every second pixel, and zeros for half of the new channels on either side.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first, second = _conv_bn(inputs, outputs, stride), _conv_bn(outputs, outputs, 1)
        self.body = nn.Sequential(*first, nn.ReLU(inplace=True), *second)
        self.stride, self.new = stride, (outputs - inputs) // 2

    def forward(self, x: Any) -> Any:
        short = x if self.stride == 1 else nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.new, self.new))
        return nn.functional.relu_(self.body(x) + short)
