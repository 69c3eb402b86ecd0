"""Batch normalisation with the statistics of a rank's own batch."""

from __future__ import annotations

import math

from numpy.typing import DTypeLike

from dpsim.nn.initial import ones, zeros
from dpsim.nn.layer import Layer, Shape
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Leaves


class BatchNorm(Layer):
    """y = gamma (x - mean) / sqrt(var + epsilon) + beta, a channel (last axis) at a time.

    x [b, C] or [b, H, W, C]. In training, mean and (biased) variance are over all rows of the rank's batch, whatever
    its leaves, and the running statistics move by ``momentum`` towards them (the variance unbiased, as in PyTorch);
    in evaluation the running statistics are used. Keeps its input for backward.
    """

    kind = "batch-norm"
    epsilon = 1e-5
    momentum = 0.1

    def __init__(self, name: str, ops: Ops, shape: Shape, dtype: DTypeLike) -> None:
        channels = shape[-1]
        super().__init__(name, ops, shape, shape, dtype, gamma=(channels,), beta=(channels,))
        self.activation_bytes_per_sample = math.prod(shape) * self.dtype.itemsize
        self.batch_norm_channels = channels
        self.running_mean = ops.zeros((channels,), dtype)
        self.running_var = ops.zeros((channels,), dtype) + 1

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        gamma, beta = self.tensors
        return {gamma.name: ones(gamma), beta.name: zeros(beta)}

    def state(self) -> dict[str, Array]:
        return {f"{self.name}.running_mean": self.running_mean, f"{self.name}.running_var": self.running_var}

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        gamma, beta = self.parameters["gamma"], self.parameters["beta"]
        y = self.buffers.take("y", x.shape)
        if not training:
            scale = gamma * (self.running_var + self.epsilon) ** -0.5
            self.ops.channel_normalise(x, self.running_mean, scale, beta, out=y)
            return y
        self._x, self._rows = x, x.size // x.shape[-1]
        self._mean, var = self.buffers.take("mean", gamma.shape), self.buffers.take("var", gamma.shape)
        self.ops.channel_moments(x, self._mean, squares_C=var)
        var /= self._rows
        self._inverse_std = (var + self.epsilon) ** -0.5
        self.ops.channel_normalise(x, self._mean, gamma * self._inverse_std, beta, out=y)
        self._update_running(self._mean, var)
        return y

    def _update_running(self, mean: Array, var: Array) -> None:
        unbiased = var * (self._rows / max(self._rows - 1, 1))
        for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
            running *= 1 - self.momentum
            running += self.momentum * now

    def write_gradients(self, grad: Array, leaves: Leaves) -> None:
        # input_gradient needs these sums of this rank, and by then the bound arrays may hold those of all ranks.
        shape = self.gradients["gamma"].shape
        self._d_gamma, self._d_beta = self.buffers.take("d_gamma", shape), self.buffers.take("d_beta", shape)
        self.ops.channel_normalise_sums(grad, self._x, self._mean, dot_C=self._d_gamma, sum_C=self._d_beta)
        self._d_gamma *= self._inverse_std
        self.gradients["gamma"][:] = self._d_gamma
        self.gradients["beta"][:] = self._d_beta

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        """dx = a (g - dbeta/M - (x - mean) inverse_std dgamma/M), a = gamma inverse_std, M rows; in place of g."""
        scale = self.parameters["gamma"] * self._inverse_std
        per_row = scale / self._rows
        slope, shift = -per_row * self._inverse_std * self._d_gamma, -per_row * self._d_beta
        self.ops.channel_normalise_backward(grad, self._x, self._mean, scale, slope, shift)
        return grad
