"""``Layer``: the base of every layer, its work buffers, and the sum over leaves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from dpsim import rng
from dpsim.choices import Problem
from dpsim.nn.ops import Ops
from dpsim.replica import Array, Batch, LayerSpec, Leaves, Rounding, Slot
from dpsim.workload import Tensor

Shape = tuple[int, ...]
T = TypeVar("T")


def leaf_ranges(leaves: Leaves) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each leaf."""
    return itertools.pairwise(leaves)


def slot_parts(values_L: Array, extra_slots: Sequence[Slot]) -> list[Array]:
    """Return the values of a batch's leaves [L, ...], divided into those of each slot."""
    edges = [0, *(slot.first_leaf for slot in extra_slots), len(values_L)]
    return [values_L[first:stop] for first, stop in itertools.pairwise(edges)]


def _itself(values: Array) -> Array:
    return values


def tree_sum(values_L: Array | Sequence[Array], each: Callable[[Array], Array] = _itself) -> Array:
    """Return the sum of [L, ...], the values of L >= 1 leaves, along the tree: of pairs, of pairs of pairs, and so on.

    ``each`` is applied to the values and to every sum, many at a time.
    """
    sums = each(np.stack(values_L) if isinstance(values_L, Sequence) else values_L)
    while len(sums) > 1:
        pairs = len(sums) // 2
        halves = sums[::2].copy()  # with the last one, if their number is odd
        halves[:pairs] = each(sums[: 2 * pairs : 2] + sums[1 : 2 * pairs : 2])
        sums = halves
    total: Array = sums[0]
    return total


class Buffers:
    """Work arrays by name, kept between steps: a request takes the front of a flat array that grows when needed.

    Fresh memory is zero, and an element of a sample has the same address for any number of samples: an array that is
    written only inside its border keeps a zero border.
    """

    def __init__(self, ops: Ops, dtype: DTypeLike) -> None:
        self._ops, self._dtype = ops, np.dtype(dtype)
        self._flat: dict[str, Array] = {}

    def take(self, name: str, shape: Shape, dtype: DTypeLike | None = None) -> Array:
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = self._ops.zeros((size,), self._dtype if dtype is None else dtype)
        return flat[:size].reshape(shape)

    def lend(self, name: str, shape: Shape) -> Array:
        """Return an array of any values for a result. Where results share memory (``Ops.results``) it serves others
        when nobody holds it; elsewhere this is ``take``."""
        results = self._ops.results
        return self.take(name, shape) if results is None else results.lend((id(self), name), shape, self._dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays kept by name."""
        return sum(int(flat.nbytes) for flat in self._flat.values())


class Layer:
    """One layer: shapes of a sample in and out, gradient tensors, forward, and backward in two parts.

    ``forward`` and the gradients take a rank's whole batch and its leaf boundaries. They return buffers that the next
    call overwrites, and ``input_gradient`` may overwrite its argument. ``forward`` never writes into its input, which
    another branch of the network may read too.
    """

    kind: ClassVar[str]
    activation_bytes_per_sample: float = 0.0
    batch_norm_channels: int = 0
    column_block: int = -1
    """Which block of its columns or rows this is (``dpsim.nn.column_blocks``); -1: a whole layer."""
    reads_samples: bool = False
    """Whether the gradient of its input is that of the samples, which nobody needs."""

    def __init__(
        self, name: str, ops: Ops, input_shape: Shape, output_shape: Shape, dtype: DTypeLike, **tensors: Shape
    ) -> None:
        self.name, self.ops, self.dtype = name, ops, np.dtype(dtype)
        self.input_shape, self.output_shape = input_shape, output_shape
        self.tensors = tuple(
            Tensor(name=f"{name}.{role}", shape=shape, dtype=self.dtype.name) for role, shape in tensors.items()
        )
        self.parameters: dict[str, Array] = {}
        self.gradients: dict[str, Array] = {}
        self.extra_slots: tuple[Slot, ...] = ()
        self.rounding: Rounding | None = None
        """How every leaf's gradient and every sum of two is rounded."""
        self.buffers = Buffers(ops, dtype)

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(
            name=self.name,
            kind=self.kind,
            tensors=self.tensors,
            activation_bytes_per_sample=self.activation_bytes_per_sample,
            output_bytes_per_sample=math.prod(self.output_shape) * self.dtype.itemsize,
            batch_norm_channels=self.batch_norm_channels,
            column_block=self.column_block,
        )

    def compute_with(self, ops: Ops) -> None:
        """Compute with these operations from now on, in arrays of theirs."""
        self.ops, self.buffers = ops, Buffers(ops, self.dtype)

    def bind(
        self, parameters: Mapping[str, Array], gradients: Mapping[str, Array], extra_slots: Sequence[Slot] = ()
    ) -> None:
        """Keep the arrays of this layer's tensors, by role (``weight``, ``bias``, ``gamma``, ``beta``)."""
        roles = {tensor.name: tensor.name.removeprefix(f"{self.name}.") for tensor in self.tensors}

        def by_role(arrays: Mapping[str, Array]) -> dict[str, Array]:
            return {role: arrays[name] for name, role in roles.items()}

        self.parameters, self.gradients = by_role(parameters), by_role(gradients)
        self.extra_slots = tuple(Slot(slot.first_leaf, by_role(slot.gradients)) for slot in extra_slots)

    def problems(self, rows: int) -> list[Problem]:
        """Return the operations of this layer on ``rows`` samples that have several implementations.

        Forward comes first, then the gradient of the weights, then that of the input.
        """
        return []

    def initial_parameters(self, seed: int) -> dict[str, Array]:
        return {}

    def state(self) -> dict[str, Array]:
        return {}

    def begin(self, batch: Batch) -> None:
        """Prepare for forward in training on this batch: for layers with random numbers."""

    def forward(self, x: Array, leaves: Leaves, *, training: bool) -> Array:
        raise NotImplementedError

    def write_gradients(self, grad: Array, leaves: Leaves) -> None:
        """Write the gradients of this layer's tensors, sums over the batch, into the bound arrays."""

    def input_gradient(self, grad: Array, leaves: Leaves) -> Array:
        raise NotImplementedError

    def leaf_sum(self, role: str, leaves: Leaves, write: Callable[[Leaves, Array], None], at_once: int = 1) -> None:
        """Set the gradient of ``role`` to the tree sum of its leaf gradients, for each slot into its bound array.

        ``write(leaves, out)`` computes one leaf's, or the sum along their tree over several neighbouring ones: at most
        ``at_once``, a power of two.
        """
        if self.rounding is not None:
            at_once = 1
        if not self.extra_slots:
            self._slot_sum(role, leaves, self.gradients[role], write, at_once)
            return
        edges = [0, *(slot.first_leaf for slot in self.extra_slots), len(leaves) - 1]
        for gradients, (first, stop) in zip(self.slots, itertools.pairwise(edges), strict=True):
            self._slot_sum(role, leaves[first : stop + 1], gradients[role], write, at_once)

    @property
    def slots(self) -> list[Mapping[str, Array]]:
        """The bound gradients of each slot, by role."""
        return [self.gradients, *(slot.gradients for slot in self.extra_slots)]

    def _slot_sum(
        self, role: str, leaves: Leaves, out: Array, write: Callable[[Leaves, Array], None], at_once: int
    ) -> None:
        """Sum a slot; the first leaf's gradient is written straight into the bound array.

        A binary counter needs log2(leaves) + 1 arrays: after leaf i, as many pairs are complete as i has trailing one
        bits. The remaining sums are added from the right, as in ``dpsim.kernels.allreduce.tree``. ``at_once`` leaves, a
        power of two, are a whole subtree and count as one leaf.
        """
        stack = [out]
        depth = 0
        for number, first in enumerate(range(0, len(leaves) - 1, at_once)):
            if depth == len(stack):
                stack.append(self.buffers.take(f"{role} partial sum {depth}", out.shape))
            write(leaves[first : first + at_once + 1], stack[depth])
            if self.rounding is not None:
                self.ops.round(stack[depth], self.rounding, out=stack[depth])
            depth += 1
            while number & 1:
                self._merge(stack, depth := depth - 1)
                number >>= 1
        while depth > 1:
            self._merge(stack, depth := depth - 1)

    def _merge(self, stack: list[Array], top: int) -> None:
        if self.rounding is None:
            self.ops.add(stack[top - 1], stack[top], out=stack[top - 1])
        else:
            self.ops.add_rounded(stack[top - 1], stack[top], self.rounding, out=stack[top - 1])


class WeightPart(NamedTuple):
    """Rows and columns (the last two dimensions) of the weight of a layer: all of them, or those of a block."""

    weight: Tensor
    rows: slice = slice(None)
    columns: slice = slice(None)

    @classmethod
    def of(cls, layer: Layer, rows: slice = slice(None), columns: slice = slice(None)) -> WeightPart:
        """Return a part of the weight of a layer, which is its first tensor."""
        return cls(layer.tensors[0], rows, columns)

    def he_normal(self, seed: int) -> Array:
        """Return normal numbers of variance 2 / fan_in (He et al., arXiv:1502.01852), from the weight's own stream.

        ``fan_in`` is that of the whole weight: all its dimensions but the last one multiplied.
        """
        weight = self.weight
        values = rng.normal(weight.name, seed, weight.shape, dtype=weight.dtype)
        values *= math.sqrt(2.0 / math.prod(weight.shape[:-1]))
        return np.ascontiguousarray(values[..., self.rows, self.columns])


def unit_scale(gamma: Tensor, beta: Tensor) -> dict[str, Array]:
    """Return the initial values of a norm: gamma 1, beta 0."""
    return {gamma.name: np.ones(gamma.shape, gamma.dtype), beta.name: np.zeros(beta.shape, beta.dtype)}
