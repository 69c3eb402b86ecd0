"""The CUDA kernels on a GPU: every version, mode, dtype and variant against the reference; many rounds in a row.

Skipped, with the reason, where there is none. ``pytest -m gpu`` runs these tests alone.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_cases as cases
import numpy as np
import pytest
from gpu_processes import why_memory_is_not_shared, why_processes_cannot_share_gpus

from dpsim.kernels.allreduce import registry
from dpsim.kernels.allreduce.tree import slots

pytestmark = pytest.mark.gpu
ROUNDS_S = 90
LENGTHS = (0, 1, 7, 33, 4099, 300_007)
SHIFTS = ((0,), (1,), (3,), (0, 1))


def missing() -> str | None:
    """Why there is no GPU to run on; None if there is one."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "no CUDA device: numba-cuda is not installed"
    from numba import cuda
    from numba.cuda.cudadrv.error import CudaSupportError

    try:
        cuda.current_context()
    except CudaSupportError as error:
        return f"no CUDA device: {' '.join(str(error).split())}"
    return None


@pytest.fixture(scope="module", autouse=True)
def _on_a_gpu() -> None:
    if reason := missing():
        pytest.skip(reason)


def fetch(buffer: Any) -> Any:
    return buffer.copy_to_host()


def wrong_in(case: cases.Case, mode: str) -> str | None:
    from numba import cuda

    memory = cases.Memory(case, cuda.to_device, cases.View)
    version = next(v for v in registry.versions("cuda") if v.name == case.version)
    apart = range(len(set(case.slots.owners))) if case.apart and mode == "split" else (None,)
    launches = [version.make(memory.arrays, case.slots, rank=r, mode=mode, **memory.options()) for r in apart]
    for stages in zip(*(launch.stages for launch in launches), strict=True):
        for stage in stages:
            stage(0)
    cuda.synchronize()
    return memory.wrong(fetch)


@pytest.mark.parametrize("mode", ["one-launch", "split"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("version", cases.VERSIONS)
def test_versions_give_the_reference_to_the_bit(version: str, dtype: str, mode: str) -> None:
    shifts = itertools.cycle(SHIFTS)
    scales = itertools.cycle((1.0, 1 / 3, 1 / 7))
    for ranks in (2, 3, 8, 103):
        for length in LENGTHS:
            case = cases.Case(version, dtype, ranks, length, next(shifts), "scale", length % 2 == 0, next(scales))
            assert wrong_in(case, mode) is None, case


@pytest.mark.parametrize("mode", ["one-launch", "split"])
@pytest.mark.parametrize("variant", ["float16", "bfloat16"])
def test_compression_gives_the_reference_to_the_bit(variant: str, mode: str) -> None:
    shifts = itertools.cycle(SHIFTS)
    for ranks in (1, 3, 8):
        for length in LENGTHS:
            case = cases.Case("two-shot", "float32", ranks, length, next(shifts), variant, False, 1 / 3)
            assert wrong_in(case, mode) is None, case


def test_more_than_the_threads_hold_at_once_goes_in_rounds() -> None:
    """One-shot keeps sums in registers: 8 M elements are several rounds of them."""
    assert wrong_in(cases.Case("one-shot", "float32", 2, 8_000_003), "one-launch") is None


@pytest.mark.parametrize("version", ["ring", "halving-doubling", "one-shot", "two-shot"])
@pytest.mark.parametrize("length", [5, 70_001])
def test_ten_thousand_rounds_in_a_row_are_right(version: str, length: int) -> None:
    """Each round every rank writes other numbers, as backward does; a kernel counts what was wrong."""
    from cuda_rounds import fill_and_check
    from numba import cuda

    ranks = 4
    arrays = [cuda.to_device(np.zeros(length, np.float32)) for _ in range(ranks)]
    wrong = cuda.to_device(np.zeros(1, np.int32))
    chosen = next(v for v in registry.versions("cuda") if v.name == version)
    launch = chosen.make(arrays, slots(range(ranks + 1)), mode="one-launch")
    for number in range(10_000):
        for rank in range(ranks):
            fill_and_check(number, rank, ranks, arrays[rank], wrong)
        for stage in launch.stages:
            stage(0)
    assert wrong.copy_to_host()[0] == 0


@pytest.mark.timeout(ROUNDS_S + 20)
def test_processes_wait_for_each_other_by_flags(python: Callable[..., Any]) -> None:
    """10,000 rounds between GPUs; few where processes share one, whose kernels take turns on it."""
    from numba import cuda

    if reason := why_processes_cannot_share_gpus() or why_memory_is_not_shared():
        pytest.skip(reason)
    rounds = "10000" if len(cuda.gpus) > 1 else "10"
    ran = python(str(Path(__file__).parents[1] / "support" / "cuda_rounds.py"), rounds, timeout_s=ROUNDS_S)
    assert ran.returncode == 0, ran.stderr
    assert set(json.loads(ran.stdout)["wrong"].values()) == {0}
