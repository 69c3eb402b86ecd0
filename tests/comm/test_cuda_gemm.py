"""Products of bfloat16 codes without a GPU: GEMM's arguments, the kernel that rounds, and its code."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_cases import code_of, need_a_compiler, simulated

from dpsim.comm.cuda.available import why_no_gpu
from dpsim.comm.cuda.gemm import Coded, Gemm, gemm

needs_numba_cuda = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed (pip install -e '.[dev]')"
)
SHAPES = [(3, 5, 4), (4, 4, 4), (1, 6, 2), (6, 1, 2), (5, 2, 1), (1, 1, 1), (2, 1, 1)]
"""Rows of the product, its columns, and what is added up."""


def by_columns(asked: Gemm, a: Any, b: Any) -> Any:
    """C of cuBLAS's definition, number by number: element (i, j) of a matrix is ``buffer[i + j * ld]``."""
    assert asked.lda >= (asked.k if asked.transa else asked.m)
    assert asked.ldb >= (asked.n if asked.transb else asked.k)
    assert asked.ldc >= asked.m
    c = np.full(asked.m * asked.n, np.nan)
    for i, j in itertools.product(range(asked.m), range(asked.n)):
        total = 0.0
        for p in range(asked.k):
            of_a = a[p + i * asked.lda] if asked.transa else a[i + p * asked.lda]
            of_b = b[j + p * asked.ldb] if asked.transb else b[p + j * asked.ldb]
            total += of_a * of_b
        c[i + j * asked.ldc] = total
    return c


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transposed", list(itertools.product([False, True], repeat=2)))
def test_a_product_row_by_row_is_the_gemm_that_is_asked_for(
    shape: tuple[int, int, int], transposed: tuple[bool, bool]
) -> None:
    rows, columns, inner = shape
    random = np.random.default_rng(0)
    left, right = random.integers(-9, 9, (rows, inner)), random.integers(-9, 9, (inner, columns))
    coded = [
        Coded(codes=(m.T if t else m).ravel(), rows=m.shape[0], columns=m.shape[1], transposed=t)
        for m, t in zip((left, right), transposed, strict=True)
    ]
    c = by_columns(gemm(*coded), coded[1].codes, coded[0].codes)
    np.testing.assert_array_equal(c.reshape(rows, columns), left @ right)


@needs_numba_cuda
def test_codes_and_products_in_the_simulator_have_the_bits_of_the_reference(
    python: Callable[..., Any],
) -> None:
    results = simulated(python, "simulate_cuda_products.py", timeout_s=100)
    assert results == {"encodings": 12, "products": 20, "wrong": []}


@pytest.mark.gpu
def test_codes_and_products_on_a_gpu_are_those_of_the_reference() -> None:
    if reason := why_no_gpu():
        pytest.skip(f"no CUDA device: {reason}")
    import simulate_cuda_products as products

    from dpsim.comm.cuda.available import open_device
    from dpsim.comm.cuda.memory import DeviceMemory

    memory = DeviceMemory(open_device(0))
    assert [text for case in products.encodings() if (text := products.wrong_codes(*case, memory)) is not None] == []
    assert [text for case in products.products() if (text := products.wrong_product(*case, memory)) is not None] == []


@needs_numba_cuda
def test_the_kernel_that_rounds_compiles_to_accesses_of_16_bytes() -> None:
    need_a_compiler()
    from dpsim.kernels import bfloat16_cuda

    given = bfloat16_cuda.arguments(512, 1024, 67)
    assert given[4] == (0, 8, 3)
    assert bfloat16_cuda.arguments(516, 1024, 67)[4] == (0, 0, 67)  # not aligned: one by one
    for cc in ((8, 0), (9, 0)):
        ptx = code_of(bfloat16_cuda.kernel(), given, cc)
        loads, stores = (len(re.findall(rf"{name}\.global\.v4\.\w32", ptx)) for name in ("ld", "st"))
        assert loads == 2 * stores > 0
        assert "cvt.rn.bf16x2.f32" in ptx and "ftz" not in ptx and ".local" not in ptx
