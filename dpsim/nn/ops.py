"""``Ops``: the array operations of layers. Layers import no backend; an ``Ops`` is an argument of their constructor.

Every operation writes into the array it is given and keeps its dtype. Arrays are C-contiguous; the last axis is the
channel. ``channel_*`` operations treat an array as rows of C channels.

The bits of sums over samples depend on the batch; so may those of a sample's rows in products and convolutions, which
therefore take the leaf boundaries. In all other operations a sample's elements have the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpsim.choices import Choices
from dpsim.dtypes import ComputeDtype
from dpsim.memory import LayerKernels, Memory
from dpsim.nn.results import Results
from dpsim.replica import Array, BatchSums, CodeTable, DeferredSums, Leaves, Rounding


class Workspace(Protocol):
    """A lender of work arrays of one dtype by name; an array keeps its content until the next request of that name."""

    def take(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return zeroed memory. An element of a sample has the same address for any number of samples."""


class Ops(Protocol):
    """The operations of a backend. Legend: b samples, H W height and width, C channels, K kernel size.

    ``xp`` is the module of its arrays, NumPy or one with its functions: what layers compute of a few numbers a channel
    they write with it.
    """

    @property
    def xp(self) -> Any: ...

    @property
    def memory(self) -> Memory:
        """The memory of the arrays."""

    def layer_kernels(self, dtype: DTypeLike) -> LayerKernels | None:
        """Return kernels that do several of these operations at once on arrays of a dtype, where there are any."""

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array: ...

    @property
    def results(self) -> Results | None:
        """The memory that results of layers share; None where each has its own."""

    def tolerate_overflow(self) -> AbstractContextManager[Any]:
        """Silence warnings of infinities and NaN while it is open (the caller checks the loss)."""

    def upload(self, name: str, host: Array) -> Array:
        """Return a batch's array as these operations take it, valid until the next one of that name."""

    def sums(self, slot_losses: Sequence[Array], correct: Array, samples: int) -> BatchSums | DeferredSums:
        """Return the sums of a batch from numbers that operations returned. Never waits for them."""

    def in_leaves(self) -> Ops:
        """Return the same operations for training in leaves, in which a leaf must have the bits it has alone."""

    def use(self, choices: Choices | None = None, table: CodeTable | None = None) -> None:
        """Compute with these choices in plain training and with this table in leaves; None leaves them as they are."""

    def multiply_in(self, dtype: ComputeDtype) -> None:
        """Round the operands of products and convolutions to this dtype from now on; sums are in float32 all the same.

        bfloat16 is for arrays of float32. What ``in_leaves`` returned or returns does likewise.
        """

    @property
    def work_bytes(self) -> int:
        """Bytes of the arrays that rounded operands are kept in."""

    def product(self, x: Array, weight: Array, leaves: Leaves, out: Array) -> None:
        """out = x weight; each leaf has the bits it has alone."""

    def product_with_transposed(self, grad: Array, weight: Array, leaves: Leaves, out: Array) -> None:
        """out = grad weight^T; each leaf has the bits it has alone."""

    def transposed_product(self, x: Array, grad: Array, leaves: Leaves, out: Array) -> None:
        """out = the sum over leaves of x^T grad, along the tree; each with the bits it has alone."""

    def leaf_sums(self, x_bC: Array, leaves: Leaves, out_C: Array) -> None:
        """out = the sum over leaves of x, along the tree."""

    def products_at_once(self, x: Array, grad: Array, leaves: Leaves) -> int:
        """Return how many leaves ``transposed_product`` and ``leaf_sums`` take at most, a power of two."""

    def conv_at_once(self, x_bHWi: Array, weight_KKio: Array, stride: int, leaves: Leaves) -> int:
        """Return how many leaves ``conv2d_weight_gradient`` takes at most, a power of two."""

    def add(self, a: Array, b: Array, out: Array) -> None: ...

    def round(self, x: Array, to: Rounding, out: Array) -> None:
        """out = x rounded to 16 bits, of float32 numbers; ``out`` may be ``x``."""

    def add_rounded(self, a: Array, b: Array, to: Rounding, out: Array) -> None:
        """out = a + b rounded to 16 bits; ``out`` may be one of them."""

    def channel_sum(self, x: Array, out: Array) -> None:
        """out_C = sum over rows of x."""

    def channel_dot(self, x: Array, y: Array, out: Array) -> None:
        """out_C = sum over rows of x * y."""

    def channel_add(self, x: Array, shift_C: Array, out: Array) -> None:
        """out = x + shift, a channel at a time; ``out`` may be ``x``."""

    def channel_multiply(self, x: Array, scale_C: Array, out: Array) -> None:
        """out = x * scale, a channel at a time; ``out`` may be ``x``."""

    def relu(self, x: Array, out: Array, mask: Array) -> None:
        """out = max(x, 0), mask = x > 0 (NaN stays NaN)."""

    def keep_where(self, x: Array, mask: Array) -> None:
        """x = x where mask else 0, in place."""

    def channel_moments(self, x: Array, mean_GC: Array, squares_GC: Array) -> None:
        """mean = the mean of the rows of x, squares = the sum over rows of (x - mean)^2, a channel at a time.

        Here and in ``channel_normalise*``, x may be G groups of neighbouring rows, as many in each; arrays [G, C] then
        have a row for each group. The bits of a group are those it has alone.
        """

    def channel_normalise(self, x: Array, mean_GC: Array, scale_GC: Array, shift_C: Array, out: Array) -> None:
        """out = (x - mean) scale + shift, a channel at a time; ``out`` may be ``x``."""

    def channel_normalise_sums(self, grad: Array, x: Array, mean_GC: Array, dot_GC: Array, sum_GC: Array) -> None:
        """dot = sum over rows of grad (x - mean), sum = sum over rows of grad."""

    def channel_normalise_backward(
        self, grad: Array, x: Array, mean_GC: Array, a_GC: Array, b_GC: Array, c_GC: Array
    ) -> None:
        """grad = a grad + b (x - mean) + c, in place, a channel at a time."""

    def conv2d(
        self, x_bHWi: Array, weight_KKio: Array, stride: int, leaves: Leaves, out_bhwo: Array, work: Workspace
    ) -> None:
        """out[b,h,w,o] = sum over i,j,c of x[b, s h + i - K//2, s w + j - K//2, c] W[i,j,c,o], zero outside; s stride.

        h = ceil(H / s), w = ceil(W / s). Each leaf has the bits it has alone.
        """

    def conv2d_weight_gradient(
        self, x_bHWi: Array, grad_bhwo: Array, leaves: Leaves, stride: int, out_KKio: Array, work: Workspace
    ) -> None:
        """Compute the gradient of the weights of ``conv2d``, a sum over the samples: of leaves, along the tree."""

    def conv2d_input_gradient(
        self, grad_bhwo: Array, weight_KKio: Array, stride: int, leaves: Leaves, out_bHWi: Array, work: Workspace
    ) -> None:
        """Compute the gradient of the input of ``conv2d``; each leaf has the bits it has alone."""

    def max_pool(self, x_bHWC: Array, row_max: Array, pick_left: Array, pick_upper: Array, out: Array) -> None:
        """Take the maximum over windows of 2 x 2; the masks mark the larger of each pair (the first of equal ones)."""

    def max_pool_backward(self, grad: Array, pick_left: Array, pick_upper: Array, row_grad: Array, out: Array) -> None:
        """Give each gradient to the element that was the maximum; the rest of ``out`` is zero."""

    def spatial_mean(self, x_bHWC: Array, out_bC: Array) -> None: ...

    def spatial_mean_backward(self, grad_bC: Array, out_bHWC: Array) -> None: ...

    def softmax_cross_entropy(
        self, logits_bC: Array, labels_b: NDArray[np.int64], losses_b: Array, grad_bC: Array
    ) -> Array:
        """losses = -log softmax(logits)[label] and its gradient; returns the correct predictions, for ``sums``."""

    def subsample(self, x_bHWC: Array, stride: int, out: Array) -> None:
        """Take every stride-th pixel, in the middle channels of ``out`` [b, ceil(H/stride), ceil(W/stride), O].

        The other channels are zero; (O - C) // 2 of them are in front.
        """

    def subsample_backward(self, grad: Array, stride: int, out: Array) -> None:
        """Put the gradients at the pixels that were taken; zero elsewhere."""

    def normalise(self, x_nPC: Array, epsilon: float, out: Array, inverse_std: Array) -> None:
        """out = (x - mean) inverse_std, inverse_std = (var + epsilon)**-0.5, over P positions and C/G channels.

        Groups are of neighbouring channels; the variance is the biased one. The bits of a row depend on it alone.
        """

    def normalise_backward(self, grad_nPC: Array, normalised: Array, inverse_std: Array) -> None:
        """grad = inverse_std (grad - mean(grad) - normalised mean(grad normalised)), in place, means as above."""

    def random_mask(self, purpose: str, seed: int, step: int, first_sample: int, dropped: int, out: Array) -> None:
        """out[i] = whether 16 random bits an element are >= ``dropped``; those of ``rng.sample_bits``."""

    def move_pictures(
        self, x_bHWC: Array, most: int, places_b2: Array, flipped_b: Array, out: Array, work: Workspace
    ) -> None:
        """out[h, w] = x[h + top - most, w + left - most], zero outside, and that mirrored left to right where flipped.

        (top, left) of each picture are its ``places``, 0 to 2 ``most``.
        """

    def scale_where(self, x: Array, mask: Array, scale: float, out: Array) -> None:
        """out = x scale where mask, 0 elsewhere (NaN stays NaN); ``out`` may be ``x``."""

    def smooth_labels(
        self, logits_bC: Array, labels_b: NDArray[np.int64], smoothing: float, losses_b: Array, grad_bC: Array
    ) -> None:
        """Turn losses and gradients of the cross-entropy into those with smoothed labels, in place.

        Smoothed: (1 - smoothing) of the cross-entropy, and smoothing of the mean of -log p over the classes.
        """
