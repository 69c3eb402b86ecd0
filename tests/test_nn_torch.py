"""PyTorch as an independent witness: the same network and the same optimizer give the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nn_setup import Recorder, batch_for, bound

from dpsim.nn import Network, build_model, update
from dpsim.optimizer import Sgd
from dpsim.replica import Array, Batch

torch = pytest.importorskip("torch")


def to_torch(network: Network, parameters: dict[str, Array]) -> tuple[Any, dict[str, Any]]:
    """The network in PyTorch with the same values, and its parameters by our names (weights in PyTorch's order)."""
    modules, named = [], {}
    for layer in network.chain:
        name, outputs = layer.name, layer.output_shape[-1]
        if layer.kind == "conv":
            module = torch.nn.Conv2d(layer.input_shape[-1], outputs, 3, padding=1, bias=False)
            named[f"{name}.weight"] = module.weight
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


def torch_order(value: Array) -> Array:
    """Conv [K, K, in, out] -> [out, in, K, K]; dense [in, out] -> [out, in]."""
    return np.ascontiguousarray(value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("token", ["mlp:6,5", "cnn:4,6,6"])
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


def close(ours: Array, theirs: Array, name: str) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11, err_msg=name)
