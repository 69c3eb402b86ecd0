"""Launches every kernel of layers with the real numba-cuda on the driver that ``stub_libcuda.c`` stands in for.

``python launch_layers_on_stub.py STREAM``
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import cuda

from dpsim.kernels.layers_cuda import LayerKernels

SAMPLES, SIDE, CHANNELS, GROUPS = 4, 6, 8, 2


class OnDevice(np.ndarray[Any, Any]):
    """Memory of the host that the stub takes for its own."""

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.__array_interface__


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32).view(OnDevice)


def main(address: int) -> None:
    """Launch each with arrays of the shapes that layers have."""
    kernels = LayerKernels(
        cuda.external_stream(address), lambda size_bytes: np.zeros(size_bytes, np.uint8).view(OnDevice)
    )
    x, y, grad = (zeros(SAMPLES, SIDE, SIDE, CHANNELS) for _ in range(3))
    weight, of_groups, of_channels = zeros(3, 3, CHANNELS, CHANNELS), zeros(GROUPS, CHANNELS), zeros(1, CHANNELS)
    kernels.conv2d(x, weight, 1, y)
    kernels.conv2d_input_gradient(grad, weight, 2, x)
    kernels.conv2d_weight_gradient(x, grad, 1, weight)
    kernels.moments(x, of_groups, of_groups)
    kernels.local_moments(x, of_channels, (of_channels,) * 2, 0.1, 1e-5, (of_channels,) * 3)
    kernels.normalise(x, of_groups, of_groups, of_channels, y, True)
    kernels.sums(grad, x, of_groups, of_groups, of_groups, (of_groups, of_channels))
    kernels.local_gradients(grad, x, (of_channels,) * 3, None, (of_channels,) * 4)
    kernels.normalise_backward(grad, x, *(of_groups,) * 4, of_channels)
    kernels.rectified_sum(x, y, grad)
    kernels.both_gradients(grad, y, x)
    kernels.tree_sum([x, y, grad], zeros(*x.shape))


if __name__ == "__main__":
    main(int(sys.argv[1]))
