"""``DeviceOps``: the operations in a device's memory, where they are written otherwise than for NumPy.

With CuPy's arrays products are cuBLAS's in float32 (TF32 where CUPY_TF32=1 asks for it) or of bfloat16 operands, added
in float32, and all else is CuPy's own code. The same runs on NumPy's arrays, where it is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from dpsim.memory import Memory
from dpsim.nn.array_ops import ArrayOps, Place, grouped
from dpsim.nn.ops import Ops
from dpsim.replica import Array, BatchSums, DeferredSums

_PLACE_BYTES = 256
"""cuBLAS chooses its code by how operands are aligned, up to this many bytes."""


class DeviceOps(ArrayOps):
    """See ``Ops`` for what each operation computes. Nothing waits for the device."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory.xp)
        self.memory = memory
        self._coded = memory.coded_products()

    def tolerate_overflow(self) -> AbstractContextManager[Any]:
        """A device warns of nothing; NumPy in its place would."""
        return np.errstate(over="ignore", invalid="ignore", divide="ignore")

    def in_leaves(self) -> Ops:
        ops = DeviceLeafOps(self.memory)
        ops.multiply_in(self.compute_dtype)
        return ops

    @property
    def work_bytes(self) -> int:
        return self._coded.size_bytes if self._coded is not None else 0

    def operand(self, place: Place, x: Array) -> Any:
        if self._coded is None or self.compute_dtype == "float32":
            return super().operand(place, x)
        return self._coded.encode(place, x)

    def matmul(self, a: Any, b: Any, out: Array) -> None:
        if self._coded is None or self.compute_dtype == "float32":
            return super().matmul(a, b, out)
        self._coded.multiply(a, b, out)

    def upload(self, name: str, host: Array) -> Array:
        return self.memory.upload(name, host)

    def sums(self, slot_losses: Sequence[Array], correct: Array, samples: int) -> BatchSums | DeferredSums:
        values = self.xp.empty(len(slot_losses) + 1, np.float64)
        for slot, loss in enumerate(slot_losses):
            values[slot] = loss
        values[len(slot_losses)] = correct
        return DeferredSums(values=values, samples=samples, memory=self.memory)

    def channel_dot(self, x: Array, y: Array, out: Array) -> None:
        """CuPy's einsum would multiply many small matrices."""
        rows, t = grouped(x)
        products = rows * y.reshape(rows.shape)
        self.xp.add.reduce(self.xp.add.reduce(products, axis=0).reshape(t, -1), axis=0, out=out)

    def _group_sums(self, rows_nRI: Array, others_nRI: Array | None, channels: int, groups: int) -> Array:
        xp, n = self.xp, len(rows_nRI)
        terms = rows_nRI if others_nRI is None else rows_nRI * others_nRI
        if groups == 1:
            sums: Array = xp.add.reduce(terms.reshape(n, -1), axis=1)
            return sums[:, None]
        sums = xp.add.reduce(terms, axis=1)
        sums = xp.add.reduce(sums.reshape(n, -1, channels), axis=1)
        sums = xp.add.reduce(sums.reshape(n, groups, -1), axis=2)
        return sums


class DeviceLeafOps(DeviceOps):
    """The same for training in leaves: every leaf has products of its own, whose operands lie at aligned places.

    An operand that lies elsewhere is copied. What CuPy allocates begins at a multiple of 512 bytes.
    """

    def in_leaves(self) -> Ops:
        return self

    def operand(self, place: Place, x: Array) -> Any:
        """Codes are at an aligned place already."""
        given = super().operand(place, x)
        return self._placed(given) if self._coded is None or self.compute_dtype == "float32" else given

    def matmul(self, a: Any, b: Any, out: Array) -> None:
        target = out if self._is_placed(out) else self.xp.empty(out.shape, out.dtype)
        super().matmul(a, b, target)
        if target is not out:
            out[...] = target

    def _is_placed(self, array: Array) -> bool:
        return self.memory.address(array) % _PLACE_BYTES == 0

    def _placed(self, array: Array) -> Array:
        """The array, contiguous or the transposed of one that is, at an aligned place."""
        if self._is_placed(array):
            return array
        return array.copy() if array.flags.c_contiguous else array.T.copy().T
