"""Holds this project's kernels of layers against NumPy, at the sizes of a training, before the training is timed.

Every different convolution and batch norm of a network, with the rectifier and the sum of branches that follow it, runs
forward and backward once on random numbers: in the memory of a GPU, and by NumPy on the host in float64 (NumPy adds up
rows one after another, and half a million of them in float32 are too inexact to hold a kernel against).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from dpsim.memory import HOST, Memory
from dpsim.nn import Network
from dpsim.nn.batch_norm import BatchNorm
from dpsim.nn.layer import Layer
from dpsim.nn.layers import Conv2D, ReLU
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.nn.residual import residual
from dpsim.processor import LAYERS_VARIABLE
from dpsim.replica import Array

TOLERANCE = 1e-3
"""Between an element and the right one, as a part of the right ones' root mean square: rounding makes 1e-5 of it."""
_NEAR_ZERO = 1e-2
"""A rectifier whose operand is nearer to zero gets the gradient 0: rounding may decide whether another one counts."""


def check_layers(network: Network, samples: int, memory: Callable[[], Memory]) -> None:
    """Raise ``ArithmeticError`` with the first difference between the layers in a new ``memory`` and NumPy's."""
    parts = parts_of(network)
    where = memory() if parts else HOST
    for text, make in parts.items():
        if differs := difference(make, samples, where):
            raise ArithmeticError(
                f"{differs} of {text} at {samples} samples is not NumPy's: {LAYERS_VARIABLE}=cupy computes layers"
                " without this project's kernels"
            )


Make = Callable[[str], Network]
"""Makes a network of this number format."""


def parts_of(network: Network) -> dict[str, Make]:
    """Return networks with one convolution or one norm each, and with what follows it, by a description."""
    parts: dict[str, Make] = {}
    for layer, after in itertools.pairwise(network.chain):
        if isinstance(layer, Conv2D):
            size = f"{layer.kernel}x{layer.kernel}"
            text = f"a convolution {size} of {layer.input_shape} to {layer.output_shape}"
            parts[text] = functools.partial(_convolution, layer)
        elif isinstance(layer, BatchNorm):
            rectified = isinstance(after, ReLU)
            text = f"a batch norm of {layer.input_shape} with its {'rectifier' if rectified else 'branch'}"
            parts[text] = functools.partial(_norm, layer, rectified)
    return parts


def _convolution(like: Conv2D, dtype: str) -> Network:
    outputs = like.output_shape[-1]
    alone = Conv2D("conv", NumpyOps(), like.input_shape, outputs, dtype, like.kernel, like.stride)
    return Network([alone], NumpyOps())


def _norm(like: BatchNorm, rectified: bool, dtype: str) -> Network:
    """Return a norm, alone or beside its own operand, and a rectifier."""
    norm = BatchNorm("norm", NumpyOps(), like.input_shape, dtype)
    layers: Iterable[Layer] = [norm] if rectified else residual("branch", [norm])
    return Network([*layers, ReLU("relu", NumpyOps(), like.input_shape, dtype)], NumpyOps())


def difference(make: Make, samples: int, memory: Memory) -> str:
    """Return the name of the first result of a network that is not NumPy's in ``memory``, or nothing."""
    right, own = make("float64"), make("float32")
    own.compute_in(memory)
    random = np.random.Generator(np.random.SFC64(0))

    def numbers(shape: tuple[int, ...]) -> Array:
        return random.standard_normal(shape, np.float32)

    parameters = {tensor.name: numbers(tensor.shape) for spec in right.layers for tensor in spec.tensors}
    exact = {name: value.astype(np.float64) for name, value in parameters.items()}
    x = numbers((samples, *right.input_shape)) + np.float32(0.5)
    grad = numbers((samples, *right.chain[-1].output_shape))
    if isinstance(right.chain[-1], ReLU):
        rectified, before = x.astype(np.float64), make("float64")
        _bind(before, HOST, exact)
        for layer in before.chain[:-1]:
            rectified = layer.forward(rectified, (0, samples), training=True)
        grad[np.abs(rectified) < _NEAR_ZERO] = 0
    expected = results(right, HOST, exact, x.astype(np.float64), grad.astype(np.float64))
    actual = results(own, memory, parameters, x, grad)
    for name, value in expected.items():
        size = np.sqrt(np.mean(np.square(value)))
        if not (np.abs(actual[name] - value) <= TOLERANCE * size).all():  # as for NaN
            return name
    return ""


def results(
    network: Network, memory: Memory, parameters: Mapping[str, Array], x: Array, grad: Array
) -> dict[str, Array]:
    """Return output, gradients and state of a network after forward and backward on these arrays of the host."""
    gradients = _bind(network, memory, parameters)
    leaves, value = (0, len(x)), _placed(memory, x)
    for layer in network.chain:
        value = layer.forward(value, leaves, training=True)
    passed = _placed(memory, grad)
    for layer in reversed(network.chain):
        if layer.tensors:
            layer.write_gradients(passed, leaves)
        passed = layer.input_gradient(passed, leaves)
    named = {"the output": value, "the input gradient": passed}
    named |= {f"the gradient of {name}": array for name, array in gradients.items()} | network.state()
    return dict(zip(named, memory.fetch(list(named.values())), strict=True))


def _bind(network: Network, memory: Memory, parameters: Mapping[str, Array]) -> dict[str, Array]:
    """Give a network its parameters; the arrays for their gradients."""
    gradients = {name: _placed(memory, np.zeros_like(value)) for name, value in parameters.items()}
    network.bind({name: _placed(memory, value) for name, value in parameters.items()}, gradients)
    return gradients


def _placed(memory: Memory, host: Array) -> Array:
    array: Array = memory.zeros(host.nbytes).view(host.dtype).reshape(host.shape)
    memory.write(array, host)
    return array
