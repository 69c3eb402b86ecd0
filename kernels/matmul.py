"""The matrix product of a fully connected layer, forward and both backward passes.

Meaning: ``NumpyOps.dense`` and its gradients of dpsim.nn. A block of the output stays in registers; the matrix to its
right is copied, some rows and columns at a time, to where all rows of the left one find it in a cache. An element
is the sum of its products in one order, whatever the sizes: a sample's bits do not depend on its batch.
Memory passes: the weights or their gradient once, the smaller matrices from the caches.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from dpsim.kernels.cache import compiled
from dpsim.kernels.vector import ACCUMULATORS, Kernel, Value

Array = NDArray[Any]
_TERMS = 256  # of each sum at once; what is copied of the right matrix then fills some tens of KiB
_VECTORS = 4


def matmul(a_MR: Array, b_RN: Array, out_MN: Array) -> None:
    """out = a b; fastest where N is a multiple of four vectors (64 float32 with AVX-512)."""
    rows, terms = a_MR.shape
    _matmul(a_MR.dtype.name)(a_MR, b_RN, out_MN, rows, terms, b_RN.shape[1])


@compiled
def _matmul(dtype: str) -> Kernel:
    k = Kernel(dtype, ("a", "b", "out"), ("rows", "terms", "columns"))
    rows, terms, columns = k["rows"], k["terms"], k["columns"]
    panel = k.scratch(_TERMS * _VECTORS)

    def tile(column: Value, vectors: int, first: Value, end: Value, row: Value, several: int, before: bool) -> None:
        """Some rows by some vectors of the output; ``before`` tells whether there are sums to add to."""
        sums = [[k.variable() for _ in range(vectors)] for _ in range(several)]
        with k.loop(first, end) as term:
            place = (term - first) * (vectors * k.lanes)
            right = [k.load(panel, place + v * k.lanes) for v in range(vectors)]
            for i in range(several):
                left = k.vector(k.load_number(k["a"], (row + i) * terms + term))
                for v in range(vectors):
                    sums[i][v].add_product(left, right[v])
        for i in range(several):
            for v in range(vectors):
                place, total = (row + i) * columns + column + v * k.lanes, sums[i][v].get()
                count = columns - column if vectors == 1 else None
                k.store(k["out"], place, k.load(k["out"], place, count) + total if before else total, count)

    def some_terms(column: Value, vectors: int, first: Value, before: bool) -> None:
        end = (first + _TERMS).at_most(terms)
        with k.loop(first, end) as term:
            for v in range(vectors):
                count = columns - column if vectors == 1 else None
                value = k.load(k["b"], term * columns + column + v * k.lanes, count)
                k.store(panel, ((term - first) * vectors + v) * k.lanes, value)
        several = ACCUMULATORS // vectors
        whole = rows // several * several
        with k.loop(0, whole, several) as row:
            tile(column, vectors, first, end, row, several, before)
        with k.loop(whole, rows) as row:
            tile(column, vectors, first, end, row, 1, before)

    def all_terms(column: Value, vectors: int) -> None:
        some_terms(column, vectors, k.index(0), before=False)
        with k.loop(_TERMS, terms, _TERMS) as first:
            some_terms(column, vectors, first, before=True)

    width = _VECTORS * k.lanes
    wide = columns // width * width
    with k.loop(0, wide, width) as column:
        all_terms(column, _VECTORS)
    with k.loop(wide, columns, k.lanes) as column:
        all_terms(column, 1)
    return k
