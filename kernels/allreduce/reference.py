"""The reference: what every version must give, to the bit, in NumPy.

Sums go along ``tree.PartialSums.tree``, element by element; each addition is rounded to the dtype of the sum. float16
and bfloat16 (as uint16 codes) are added in float32. With a 16-bit ``compression`` (dtype and scale) either every
partial sum is rounded to 16 bits before the sum and the sum once after it, or, with ``each_sum``, these are rounded
already and the sum of every two is rounded (``dpsim.comm.compression`` says why).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.kernels.allreduce.registry import Version, register
from dpsim.kernels.allreduce.tree import PartialSums, fold

Array = NDArray[Any]


def allreduce(
    arrays: Sequence[Array],
    sums: PartialSums,
    scale: float = 1.0,
    compression: tuple[str, float] | None = None,
    *,
    each_sum: bool = False,
) -> Array:
    """Return ``scale`` times the sum of the partial sums ``arrays`` (1-D, one dtype and length), in tree order.

    The scaling is one more rounding, and none at 1.
    """
    if compression is None:
        total: Array = fold(sums.tree, arrays.__getitem__, operator.add)
    elif each_sum:
        total = fold(sums.tree, arrays.__getitem__, lambda a, b: rounded(a + b, *compression))
    else:
        sources = [rounded(array, *compression) for array in arrays]
        total = rounded(fold(sums.tree, sources.__getitem__, operator.add), *compression)
    return total if scale == 1.0 else total * total.dtype.type(scale)


def rounded(values: NDArray[np.float32], dtype: str, scale: float, xp: Any = np) -> NDArray[np.float32]:
    """Round ``values * scale`` to the nearest float16 or bfloat16, ties to even; ``scale`` is a power of two.

    ``xp`` is the module of the arrays, NumPy or one with its functions.
    """
    scaled = values * np.float32(scale)
    if dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):  # what it cannot hold becomes infinite
            scaled = scaled.astype(np.float16).astype(np.float32)
    else:
        scaled = from_bfloat16(round_to_bfloat16(scaled, xp))
    return scaled * np.float32(1 / scale)


def round_to_bfloat16(values: NDArray[np.float32], xp: Any = np) -> NDArray[np.uint16]:
    """Return bfloat16 codes, to nearest, ties to even; a NaN stays one."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    codes: NDArray[np.uint16] = xp.where(xp.isnan(values), (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
    return codes.astype(np.uint16)


def from_bfloat16(codes: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 numbers of bfloat16 codes."""
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


register(
    Version(
        name="reference",
        backend="numpy",
        summary="NumPy, one temporary array for each addition",
        bytes_moved=lambda sums, size: (3 * (len(sums.owners) - 1) + sums.ranks) * size,
        synchronisations=lambda slots: 2,
        make=allreduce,
    )
)
