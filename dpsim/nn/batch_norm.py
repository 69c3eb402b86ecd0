"""Batch normalisation with the statistics of a rank's samples, of each leaf, or of the global batch."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpsim.memory import LayerKernels
from dpsim.nn.layer import Layer, Shape, leaf_ranges, slot_parts, tree_sum, unit_scale
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Leaves, OrderedSum

_Block = tuple[slice, tuple[int, int]]


class BatchNorm(Layer):
    """y = gamma (x - mean) / sqrt(var + epsilon) + beta, a channel (last axis) at a time.

    x [b, C] or [b, H, W, C]. In training, mean and (biased) variance are over all rows of a group of samples, and the
    running statistics move by ``momentum`` towards them (the variance unbiased, as in PyTorch); in evaluation the
    running statistics are used. Keeps its input for backward. ``mode`` defines the group:

    ``local``: the rank's batch, whatever its leaves. ``leaf``: each leaf ("ghost" batch norm, Hoffer et al.,
    arXiv:1705.08741); the running statistics then move towards the mean of the leaves' statistics, weighted by their
    samples, when ``update_statistics`` is called. ``global``: all ranks' samples, through ``ordered_sum`` of sums in
    float64, [1 + 2 C] a slot in forward and [2 C] in backward.

    Where there are kernels of whole layers, ``local`` is computed by them. With ``rectifies`` they compute max(y, 0)
    and its gradient, in every mode; the rectifier that follows leaves both alone. While it is ``recomputing`` a forward
    pass leaves the running statistics alone, but ``global`` sums over the ranks again.

    Legend: G groups, L leaves, C channels.
    """

    kind = "batch-norm"
    epsilon = 1e-5
    momentum = 0.1
    rectifies = False
    recomputing = False

    def __init__(self, name: str, ops: Ops, shape: Shape, dtype: DTypeLike) -> None:
        channels = shape[-1]
        super().__init__(name, ops, shape, shape, dtype, gamma=(channels,), beta=(channels,))
        self.activation_bytes_per_sample = math.prod(shape) * self.dtype.itemsize
        self.batch_norm_channels = channels
        self.running_mean = ops.zeros((channels,), dtype)
        self.running_var = ops.zeros((channels,), dtype) + 1
        self.mode = "local"
        self.ordered_sum: OrderedSum = tree_sum
        self._rows_a_sample = math.prod(shape[:-1])

    def compute_with(self, ops: Ops) -> None:
        super().compute_with(ops)
        self.running_mean, self.running_var = map(ops.xp.asarray, (self.running_mean, self.running_var))

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        return unit_scale(*self.tensors)

    def state(self) -> dict[str, Array]:
        return {f"{self.name}.running_mean": self.running_mean, f"{self.name}.running_var": self.running_var}

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        gamma, beta = self.parameters["gamma"], self.parameters["beta"]
        y = self.buffers.lend("y", x.shape)
        if not training:
            scale = gamma * (self.running_var + self.epsilon) ** -0.5
            self._normalise(x, self.running_mean, scale, beta, y)
            return y
        self._x, all_samples = x, (0, len(x))
        if (kernels := self._local_kernels()) is not None:
            mean, inverse_std, scale = (self._channel_array(name) for name in ("mean", "inverse std", "scale"))
            self._local = (mean, inverse_std, scale)
            kernels.local_moments(x, gamma, self._moved(), self.momentum, self.epsilon, self._local)
            self._normalise(x, mean, scale, beta, y)
            return y
        self._parts = list(leaf_ranges(all_samples if self.mode == "local" else leaves))
        self._blocks = _blocks(self._parts)
        self._mean_GC, self._var_GC, self._rows_G1 = self._moments(x)
        if self.mode == "global":
            self._join_ranks()
        elif self.mode == "local":
            rows = max(len(x), 1) * self._rows_a_sample
            self._move_running(self._mean_GC[0], self._var_GC[0] * (rows / max(rows - 1, 1)))
        self._inverse_std_GC = (self._var_GC + self.epsilon) ** -0.5
        scale_GC = gamma * self._inverse_std_GC
        for groups, (start, stop) in self._groups:
            self._normalise(x[start:stop], self._mean_GC[groups], scale_GC[groups], beta, y[start:stop])
        return y

    def _local_kernels(self) -> LayerKernels | None:
        """Return the kernels for mode ``local``; none where gradients are rounded."""
        return self.ops.layer_kernels(self.dtype) if self.mode == "local" and self.rounding is None else None

    def _moved(self) -> tuple[Array, Array]:
        """Return the arrays that kernels move as running statistics."""
        if self.recomputing:
            return self._channel_array("unused mean")[0], self._channel_array("unused variance")[0]
        return self.running_mean, self.running_var

    def _channel_array(self, name: str) -> Array:
        return self.buffers.take(name, (1, self.batch_norm_channels))

    def _normalise(self, x: Array, mean_GC: Array, scale_GC: Array, shift_C: Array, out: Array) -> None:
        kernels = self.ops.layer_kernels(self.dtype)
        if self.rectifies and kernels is not None:
            kernels.normalise(x, mean_GC, scale_GC, shift_C, out, rectified=True)
        else:
            self.ops.channel_normalise(x, mean_GC, scale_GC, shift_C, out=out)

    @property
    def _groups(self) -> list[_Block]:
        """The groups of this rank's samples."""
        return self._blocks if self.mode == "leaf" else [(slice(0, 1), (0, len(self._x)))]

    def _moments(self, x: Array) -> tuple[Array, Array, Array]:
        """Return mean and biased variance [L, C] and rows [L, 1] of each part; of an empty one 0, 0 and a sample's."""
        shape = (len(self._parts), x.shape[-1])
        mean, var = self.buffers.take("mean", shape), self.buffers.take("var", shape)
        for parts, (start, stop) in self._blocks:
            if stop > start:
                self.ops.channel_moments(x[start:stop], mean[parts], squares_GC=var[parts])
            else:
                mean[parts], var[parts] = 0, 0
        rows = self.ops.xp.asarray(
            [[max(stop - start, 1) * self._rows_a_sample] for start, stop in self._parts], self.dtype
        )
        var /= rows
        return mean, var, rows

    def _samples_L1(self) -> NDArray[np.float64]:
        samples: NDArray[np.float64] = self.ops.xp.asarray([[stop - start] for start, stop in self._parts], np.float64)
        return samples

    def _join_ranks(self) -> None:
        """Replace the leaves' moments by those of all ranks' samples, as one group, and update the running statistics.

        Adds x and x^2 in float64, in which the square of a float32 number is exact.
        """
        xp = self.ops.xp
        samples, mean, var = self._samples_L1(), self._mean_GC.astype(np.float64), self._var_GC.astype(np.float64)
        sums_L = xp.hstack([samples, samples * mean, samples * (var + mean * mean)])
        total = self.ordered_sum([tree_sum(slot) for slot in slot_parts(sums_L, self.extra_slots)])
        channels = mean.shape[1]
        means = total[1 : 1 + channels] / total[0]
        variances = xp.maximum(total[1 + channels :] / total[0] - means * means, 0)
        rows_1 = total[:1] * self._rows_a_sample
        self._mean_GC, self._var_GC = means[None].astype(self.dtype), variances[None].astype(self.dtype)
        self._rows_G1 = rows_1[None].astype(self.dtype)
        correction = (rows_1 / xp.maximum(rows_1 - 1, 1)).astype(self.dtype)
        self._move_running(self._mean_GC[0], self._var_GC[0] * correction)

    def _move_running(self, mean: Array, unbiased: Array) -> None:
        if self.recomputing:
            return
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running *= 1 - self.momentum
            running += self.momentum * value

    def leaf_statistics(self) -> NDArray[np.float64]:
        """Return [L, 1 + 2 C]: each leaf's samples, and its mean and unbiased variance times these."""
        samples, rows = self._samples_L1(), self._rows_G1.astype(np.float64)
        unbiased = self._var_GC * (rows / self.ops.xp.maximum(rows - 1, 1))
        statistics: NDArray[np.float64] = self.ops.xp.hstack([samples, samples * self._mean_GC, samples * unbiased])
        return statistics

    def update_statistics(self, total: NDArray[np.float64]) -> None:
        """Move the running statistics by the sum of ``leaf_statistics`` over all leaves, [1 + 2 C]."""
        mean, unbiased = self.ops.xp.split((total[1:] / total[0]).astype(self.dtype), 2)
        self._move_running(mean, unbiased)

    def write_gradients(self, grad: Array, leaves: Leaves) -> None:
        # input_gradient needs these sums of this rank, and by then the bound arrays may hold those of all ranks.
        if (kernels := self._local_kernels()) is not None:
            self._slope, self._shift = self._channel_array("slope"), self._channel_array("shift")
            results = (self.gradients["gamma"], self.gradients["beta"], self._slope, self._shift)
            rectifier = (self._local[2], self.parameters["beta"]) if self.rectifies else None
            kernels.local_gradients(grad, self._x, self._local, rectifier, results)
            return
        shape = (len(self._parts), len(self.parameters["gamma"]))
        self._d_gamma, self._d_beta = self.buffers.take("d_gamma", shape), self.buffers.take("d_beta", shape)
        mean, inverse_std = self._mean_GC, self._inverse_std_GC
        if self.mode == "global":
            mean, inverse_std = (self.ops.xp.repeat(of_all, len(self._parts), axis=0) for of_all in (mean, inverse_std))
        for parts, (start, stop) in self._blocks:
            arguments = (grad[start:stop], self._x[start:stop], mean[parts], self._d_gamma[parts], self._d_beta[parts])
            kernels = self.ops.layer_kernels(self.dtype)
            if self.rectifies and kernels is not None:
                kernels.sums(*arguments, (self.parameters["gamma"] * inverse_std[parts], self.parameters["beta"]))
            else:
                self.ops.channel_normalise_sums(*arguments)
        self._d_gamma *= self._inverse_std_GC
        for role, sums_L in (("gamma", self._d_gamma), ("beta", self._d_beta)):
            for gradients, slot in zip(self.slots, self._slot_parts(sums_L), strict=True):
                gradients[role][:] = tree_sum(slot, self._rounded)

    def _rounded(self, sums: Array) -> Array:
        if self.rounding is not None:
            self.ops.round(sums, self.rounding, out=sums)
        return sums

    def _slot_parts(self, values_L: Array) -> list[Array]:
        """Return the values of each slot's leaves; in mode ``local`` there is one part."""
        return [values_L[:1]] if self.mode == "local" else slot_parts(values_L, self.extra_slots)

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        """dx = a (g - dbeta/M - (x - mean) inverse_std dgamma/M), a = gamma inverse_std, M rows; in place of g."""
        kernels = self.ops.layer_kernels(self.dtype)
        shift_C = self.parameters["beta"] if self.rectifies else None
        if kernels is not None and self._local_kernels() is not None:
            mean, _, scale = self._local
            kernels.normalise_backward(grad, self._x, mean, scale, self._slope, self._shift, shift_C)
            return grad
        d_gamma_GC, d_beta_GC = self._d_gamma, self._d_beta
        if self.mode == "global":
            both = self.ops.xp.hstack([d_gamma_GC, d_beta_GC])
            total = self.ordered_sum([tree_sum(slot) for slot in slot_parts(both, self.extra_slots)])
            d_gamma_GC, d_beta_GC = total.reshape(2, 1, -1)
        scale = self.parameters["gamma"] * self._inverse_std_GC
        per_row = scale / self._rows_G1
        slope, shift = -per_row * self._inverse_std_GC * d_gamma_GC, -per_row * d_beta_GC
        for groups, (start, stop) in self._groups:
            mean, a, b, c = (values[groups] for values in (self._mean_GC, scale, slope, shift))
            if kernels is not None:
                kernels.normalise_backward(grad[start:stop], self._x[start:stop], mean, a, b, c, shift_C)
            else:
                self.ops.channel_normalise_backward(grad[start:stop], self._x[start:stop], mean, a, b, c)
        return grad


def _blocks(parts: list[tuple[int, int]]) -> list[_Block]:
    """Return runs of neighbouring parts of equal size: their numbers, and their samples."""
    blocks: list[_Block] = []
    for samples, run in itertools.groupby(enumerate(parts), lambda item: item[1][1] - item[1][0]):
        (first, (start, _)), *_ = block = list(run)
        blocks.append((slice(first, first + len(block)), (start, start + len(block) * samples)))
    return blocks
