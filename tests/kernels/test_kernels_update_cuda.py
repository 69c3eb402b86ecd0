"""The optimizers' CUDA kernels without a GPU: the CPU's bits in the simulator, and no operations that are joined."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_cases import JOINED, Host, code_of, need_a_compiler, simulated

from dpsim.comm.cuda.available import why_no_gpu

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed (pip install -e '.[dev]')"
)


def test_updates_in_the_simulator_have_the_bits_of_the_cpus(
    python: Callable[..., Any],
) -> None:
    results = simulated(python, "simulate_cuda_updates.py", timeout_s=100)
    assert results == {"cases": 4 * 2 * 4 * 2 + 3, "wrong": []}


@pytest.mark.gpu
def test_updates_on_a_gpu_have_the_bits_of_the_cpus() -> None:
    if reason := why_no_gpu():
        pytest.skip(f"no CUDA device: {reason}")
    import cupy
    import simulate_cuda_updates as updates

    from dpsim.comm.cuda.available import open_device
    from dpsim.comm.cuda.memory import DeviceMemory

    with cupy.cuda.Stream.null:  # in which the kernels are launched; an earlier test may have left another one current
        assert [text for case in updates.cases() if (text := updates.wrong_in(*case, cupy)) is not None] == []
    memory = DeviceMemory(open_device(0))
    assert [text for lars in updates.LARS_CASES if (text := updates.wrong_in_lars(*lars, memory)) is not None] == []


def test_a_small_grid_is_no_warning() -> None:
    from dpsim.kernels import update_cuda
    from dpsim.kernels.allreduce.cuda.kernels import THREADS

    update_cuda._sgd("float32", False, False)[(1, 1), THREADS, 0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_operation_of_lars_is_rounded_by_itself(dtype: str) -> None:
    need_a_compiler()
    from dpsim.kernels import exact_squares_cuda, update_cuda

    number = np.dtype(dtype).type
    update = code_of(update_cuda.lars_parts(dtype), (0, 0, (0, 0, 0), (number(1), number(1), number(-1))))
    squares = code_of(exact_squares_cuda.block_digits(dtype), (0, 1, 0))
    totals = code_of(exact_squares_cuda.row_digits(dtype), (0, 1, 1, 0))
    assert not JOINED.findall(update + squares + totals)
    assert "mul.rn.f64" in squares and f"mul.rn.f{8 * np.dtype(dtype).itemsize}" in update


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_every_operation_of_an_update_is_rounded_by_itself(kind: str, dtype: str) -> None:
    need_a_compiler()
    from dpsim.kernels import update_cuda

    counts = {"sgd": (3, 4), "adamw": (4, 9)}
    arrays, numbers = counts[kind]
    kernel = update_cuda._sgd(dtype, True, True) if kind == "sgd" else update_cuda._adamw(dtype, True)
    given = update_cuda.arguments([Host(np.zeros(16, dtype)) for _ in range(arrays)], [0.5] * numbers)
    text = code_of(kernel, given)
    assert not JOINED.findall(text)
    assert re.search(r"ld\.global\.v[24]", text) and re.search(r"st\.global\.v[24]", text)
    if kind == "adamw":
        assert "div.rn.f" in text and "sqrt.rn.f" in text
