"""How a product of matrices that lie row by row is asked of a GEMM, to which they lie column by column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Coded:
    """A matrix of ``rows`` and ``columns`` as flat codes: row by row, or those of its transpose if ``transposed``."""

    codes: Any
    rows: int
    columns: int
    transposed: bool


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """The arguments of GEMM: C [m, n] = op(A) [m, k] op(B) [k, n], all column by column.

    ``transa`` says that op(A) is the transpose of A; ``lda`` is the number of elements from a column of A to the next.
    """

    transa: bool
    transb: bool
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldc: int


def gemm(left: Coded, right: Coded) -> Gemm:
    """Return the GEMM that writes left right row by row, with A the codes of ``right`` and B those of ``left``.

    What lies row by row is, column by column, its transpose. So C is the transpose of the product: that of ``right``
    times that of ``left``.
    """
    return Gemm(
        transa=right.transposed,
        transb=left.transposed,
        m=right.columns,
        n=left.rows,
        k=left.columns,
        lda=right.rows if right.transposed else right.columns,
        ldb=left.rows if left.transposed else left.columns,
        ldc=right.columns,
    )
