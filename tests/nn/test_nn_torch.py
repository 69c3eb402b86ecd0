"""PyTorch as an independent witness: the same network and the same optimizer give the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nn_setup import Recorder, batch_for, bound

from dpsim.nn import Network, build_model, update
from dpsim.nn.batch_norm import BatchNorm
from dpsim.nn.layer import Buffers
from dpsim.nn.layers import Conv2D, Dense, GlobalAveragePool
from dpsim.nn.losses import softmax_cross_entropy
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.nn.residual import residual
from dpsim.nn.sample_norm import GroupNorm
from dpsim.optimizer import Sgd
from dpsim.replica import Array, Batch

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

OPS = NumpyOps()


TOKENS = [
    "mlp:6,5",
    "mlp:6,8,norm=layer",
    "mlp:6,8,norm=group",
    "cnn:4,6,6",
    "cnn:4,6,6,norm=layer",
    "cnn:4,16,norm=group",
    "cnn:4,6,norm=instance",
    "resnet20",
    "resnet20:norm=group",
]


def to_torch(network: Network, parameters: dict[str, Array]) -> tuple[Any, dict[str, Any]]:
    """The network in PyTorch with the same values, and its parameters by our names (weights in PyTorch's order)."""
    modules, named, waiting = [], {}, []
    for layer in network.chain:
        name, outputs = layer.name, layer.output_shape[-1]
        if isinstance(layer, Conv2D):
            kernel, stride = layer.kernel, layer.stride
            module = torch.nn.Conv2d(layer.input_shape[-1], outputs, kernel, stride, kernel // 2, bias=False)
            named[f"{name}.weight"] = module.weight
        elif isinstance(layer, GroupNorm):
            module = LastAxisNorm(outputs) if layer.kind == "layer-norm" else torch.nn.GroupNorm(layer.groups, outputs)
            named |= {f"{name}.gamma": module.weight, f"{name}.beta": module.bias}
        elif layer.kind in ("fork", "swap", "join"):
            module = Marker(layer.kind, waiting)
        elif layer.kind == "subsample":
            module = PadChannels(outputs - layer.input_shape[-1])
        elif layer.kind == "batch-norm":
            module = torch.nn.BatchNorm2d(outputs)
            named |= {f"{name}.gamma": module.weight, f"{name}.beta": module.bias}
        elif layer.kind == "dense":
            module = torch.nn.Linear(layer.input_shape[0], outputs)
            named |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
        elif layer.kind == "average-pool":
            module = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        else:
            module = {"relu": torch.nn.ReLU, "flatten": torch.nn.Flatten}.get(
                layer.kind, lambda: torch.nn.MaxPool2d(2)
            )()
        modules.append(module)
    model = torch.nn.Sequential(*modules).double()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(torch.from_numpy(torch_order(parameters[name])))
    return model, named


class Marker(torch.nn.Module):
    """Residual connections with a stack, each branch after the other, as in the network's chain."""

    def __init__(self, kind: str, stack: list[Any]) -> None:
        super().__init__()
        self.kind, self.stack = kind, stack

    def forward(self, x: Any) -> Any:
        if self.kind == "fork":
            self.stack.append(x)
        elif self.kind == "swap":
            x, self.stack[-1] = self.stack[-1], x
        else:
            x = x + self.stack.pop()
        return x


class PadChannels(torch.nn.Module):
    """The shortcut of the CIFAR networks as others write it in PyTorch: every second pixel, padded channels."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.pad = (0, 0, 0, 0, extra // 2, extra - extra // 2)

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.pad(x[:, :, ::2, ::2], self.pad)


class LastAxisNorm(torch.nn.LayerNorm):
    """Layer norm over the channels, which PyTorch's pictures have in front."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def torch_order(value: Array) -> Array:
    """Conv [K, K, in, out] -> [out, in, K, K]; dense [in, out] -> [out, in]."""
    return np.ascontiguousarray(value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("token", TOKENS)
def test_three_steps_of_training_equal_pytorchs(token: str, decay: float) -> None:
    network = build_model(token, (6, 7, 1 if token.startswith("mlp") else 2), 3, np.float64)
    parameters, gradients = bound(network)
    velocity = {name: np.zeros_like(value) for name, value in parameters.items()}
    model, named = to_torch(network, parameters)
    sgd = Sgd(learning_rate=0.1, momentum=0.9, weight_decay=decay)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=decay)
    for step in range(3):
        x, labels = batch_for(network, 9, seed=step)
        sums = network.forward_backward(Batch(x=x, labels=labels, leaves=(0, 4, 9)), Recorder())
        optimizer.zero_grad()
        pictures = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
        loss = torch.nn.functional.cross_entropy(model(pictures), torch.from_numpy(labels), reduction="sum")
        loss.backward()
        assert sums.loss == pytest.approx(loss.item(), rel=1e-10)
        for name, parameter in named.items():
            close(torch_order(gradients[name]), parameter.grad.numpy(), name)
            parameter.grad /= 9
            w, g, v = (array[name].ravel() for array in (parameters, gradients, velocity))
            update(w, g, {"velocity": v}, sgd, 0.1, 1 / 9, step + 1)
        optimizer.step()
        for name, parameter in named.items():
            close(torch_order(parameters[name]), parameter.detach().numpy(), name)
    theirs = [buffer.numpy() for name, buffer in model.named_buffers() if "running" in name]
    for ours, their in zip(network.state().values(), theirs, strict=True):
        close(ours, their, "running statistics")


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_label_smoothing_is_pytorchs(smoothing: float) -> None:
    random = np.random.default_rng(0)
    logits, labels = 5 * random.standard_normal((8, 6)), random.integers(0, 6, 8)
    sums, grad = softmax_cross_entropy(OPS, Buffers(OPS, np.float64), logits, labels, (0, 8), smoothing)
    theirs = torch.from_numpy(logits).requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        theirs, torch.from_numpy(labels), reduction="sum", label_smoothing=smoothing
    )
    loss.backward()
    assert sums.loss == pytest.approx(loss.item(), rel=1e-12)
    close(grad, theirs.grad.numpy(), "logits")


def test_a_projection_shortcut_is_pytorchs() -> None:
    """1 x 1 convolutions with a stride, and batch norm in both branches."""
    shape, half = (5, 6, 2), (3, 3, 4)
    body = [Conv2D("a", OPS, shape, 4, np.float64, stride=2), BatchNorm("ba", OPS, half, np.float64)]
    shortcut = [Conv2D("p", OPS, shape, 4, np.float64, 1, 2), BatchNorm("bp", OPS, half, np.float64)]
    first = Conv2D("first", OPS, shape, 2, np.float64)
    last = [GlobalAveragePool("average", OPS, half, np.float64), Dense("last", OPS, 4, 3, np.float64)]
    network = Network([first, *residual("r", body, shortcut), *last], OPS)
    parameters, gradients = bound(network)
    model, named = to_torch(network, parameters)
    x, labels = batch_for(network, 9)
    network.forward_backward(Batch(x=x, labels=labels, leaves=(0, 9)), Recorder())
    pictures = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
    torch.nn.functional.cross_entropy(model(pictures), torch.from_numpy(labels), reduction="sum").backward()
    for name, parameter in named.items():
        close(torch_order(gradients[name]), parameter.grad.numpy(), name)


def close(ours: Array, theirs: Array, name: str) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11, err_msg=name)
