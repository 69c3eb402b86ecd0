"""``Memory``: where a replica computes. On the host, or on a device that works while the host goes on.

What a device has been asked to do is done in the order of its stream. The host asks, and waits once a step: ``fetch``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

ALIGNMENT_BYTES = 64

Array = NDArray[Any]
"""An array of a memory's ``xp``: NumPy's, or one that reads the same (CuPy's)."""


class Mark(Protocol):
    """A point in the work of a memory."""

    def done(self) -> bool:
        """Whether the work has come to it. Never waits."""

    def wait(self) -> None:
        """Return once the work has come to it."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds between two points of one memory that the work has come to."""


class CodedProducts(Protocol):
    """Products of matrices that are rounded to bfloat16, added in float32 by a device's library."""

    def encode(self, place: str, matrix: Array) -> Any:
        """The matrix in bfloat16, valid until the next one of that place; contiguous, or the transposed of such."""

    def multiply(self, left: Any, right: Any, out: Array) -> None:
        """out = left right, of what ``encode`` returned; ``out`` is contiguous."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the memory that it has taken so far."""


class LayerKernels(Protocol):
    """Operations of layers, each in one or two kernels, on contiguous arrays of float32: see ``dpsim.nn.ops.Ops``.

    A sum over a window, over the rows of a group or over samples has an order that depends on how many there are alone.
    ``rectified``: what comes out is max(., 0); in backward the ``rectifier`` is (scale_GC, shift_C) of that forward
    pass, and the gradient counts where its result was > 0. ``local``: of one group, with all that batch norm needs.
    """

    def conv2d(self, x: Array, weight: Array, stride: int, out: Array) -> None: ...

    def conv2d_input_gradient(self, grad: Array, flipped: Array, stride: int, out: Array) -> None:
        """``flipped``: the weights turned around in both directions of the picture, [K, K, outputs, inputs]."""

    def conv2d_weight_gradient(self, x: Array, grad: Array, stride: int, out: Array) -> None: ...

    def moments(self, x: Array, mean_GC: Array, squares_GC: Array) -> None: ...

    def local_moments(
        self,
        x: Array,
        gamma: Array,
        running: tuple[Array, Array],
        momentum: float,
        epsilon: float,
        results_1C: tuple[Array, Array, Array],
    ) -> None:
        """Results: mean, inverse_std = (var + epsilon)**-0.5 and gamma inverse_std.

        ``running`` are the mean and the unbiased variance, which move by ``momentum`` towards those of x.
        """

    def normalise(
        self, x: Array, mean_GC: Array, scale_GC: Array, shift_C: Array, out: Array, rectified: bool
    ) -> None: ...

    def sums(
        self, grad: Array, x: Array, mean_GC: Array, dot_GC: Array, sum_GC: Array, rectifier: tuple[Array, Array] | None
    ) -> None: ...

    def local_gradients(
        self,
        grad: Array,
        x: Array,
        statistics_1C: tuple[Array, Array, Array],
        rectifier: tuple[Array, Array] | None,
        results_C: tuple[Array, Array, Array, Array],
    ) -> None:
        """Results: d_gamma, d_beta, and b and c of ``normalise_backward`` with a = gamma inverse_std.

        ``statistics_1C`` are the results of ``local_moments``.
        """

    def normalise_backward(
        self, grad: Array, x: Array, mean_GC: Array, a_GC: Array, b_GC: Array, c_GC: Array, shift_C: Array | None
    ) -> None:
        """With ``shift_C`` the gradient counts where a (x - mean) + shift is > 0."""

    def rectified_sum(self, a: Array, b: Array, out: Array) -> None:
        """out = max(a + b, 0)."""

    def both_gradients(self, grad: Array, y: Array, copy: Array) -> None:
        """grad = copy = grad where y > 0, else 0."""

    def tree_sum(self, parts: Sequence[Array], out: Array) -> None:
        """out = the sum of the parts along the tree (``dpsim.kernels.allreduce.tree.leaf_tree``)."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the memory that it has taken so far."""


class Memory(Protocol):
    """The arrays that a replica, its gradients and the optimizer's state live in.

    ``xp`` is the module of the arrays, with NumPy's functions. ``deferred``: an operation on them may return before its
    result is there, so the host must not look at a value without ``fetch``. ``stream`` is what the operations run in:
    on a device ``dpsim.comm.cuda.device.Stream``, on the host None.
    """

    xp: Any
    deferred: bool
    stream: Any

    def use(self) -> None:
        """Let the calling thread's operations run in this memory's stream. Every thread that computes calls it."""

    def zeros(self, size_bytes: int) -> Array:
        """Zeroed bytes that start at a multiple of ``ALIGNMENT_BYTES``; on a device at one of 256."""

    def upload(self, name: str, host: Array) -> Array:
        """The values of a host array as an array of this memory, valid until the next upload of that name.

        The host array may be written as soon as this returns.
        """

    def write(self, target: Array, host: Array) -> None:
        """Copy a host array into an array of this memory, of the same shape and dtype, and wait for it."""

    def fetch(self, arrays: Sequence[Array]) -> list[Array]:
        """The values of the arrays as host arrays, once all work so far is done: the one wait of a step.

        On the host these are the arrays themselves.
        """

    def mark(self) -> Mark:
        """A point after all work so far."""

    def follow(self, mark: Mark) -> None:
        """Let the work that comes later wait for a mark of another stream. On a device the host does not wait."""

    def address(self, array: Array) -> int:
        """Where an array begins."""

    def coded_products(self) -> CodedProducts | None:
        """Products in bfloat16, the same object each time; None where they are those of ``xp`` on rounded numbers."""

    def layer_kernels(self) -> LayerKernels | None:
        """Kernels of layers, the same object each time; None where all is computed by ``xp``."""


class HostMark:
    """A point that the work has always come to; its time is the host's."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def done(self) -> bool:
        return True

    def due_s(self) -> float | None:
        """It is past; see ``dpsim.comm.transport.Request``."""
        return None

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Any) -> float:
        return float(self.at_s - earlier.at_s)


class HostMemory:
    """NumPy's arrays, on which every operation is done when it returns."""

    xp: Any = np
    deferred = False
    stream: Any = None

    def use(self) -> None:
        pass

    def zeros(self, size_bytes: int) -> Array:
        return aligned_bytes(size_bytes)

    def upload(self, name: str, host: Array) -> Array:
        return host

    def write(self, target: Array, host: Array) -> None:
        if target is not host:
            target[...] = host

    def fetch(self, arrays: Sequence[Array]) -> list[Array]:
        return list(arrays)

    def mark(self) -> Mark:
        return HostMark()

    def follow(self, mark: Mark) -> None:
        mark.wait()

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def coded_products(self) -> CodedProducts | None:
        return None

    def layer_kernels(self) -> LayerKernels | None:
        return None


HOST: Memory = HostMemory()
"""The memory of the host, of which every process has one."""


def aligned_bytes(size_bytes: int) -> NDArray[np.uint8]:
    """Zeroed host memory that starts at a multiple of ``ALIGNMENT_BYTES``."""
    raw = np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + size_bytes]
