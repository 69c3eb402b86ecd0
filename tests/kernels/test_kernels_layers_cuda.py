"""The CUDA kernels of layers without a GPU: the reference's bits in the simulator, and code that spills nothing."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_cases import JOINED, assembled, code_of, need_a_compiler, simulated, stub_driver
from python_path import extended_path
from quick_simulator import short_turns

from dpsim.comm.cuda.available import why_no_gpu
from dpsim.kernels.allreduce.cuda.simulated import fused

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed (pip install -e '.[dev]')"
)


def test_kernels_of_layers_in_the_simulator_have_the_bits_of_the_reference(python: Callable[..., Any]) -> None:
    results = simulated(python, "simulate_cuda_layers.py", timeout_s=200)
    assert results == {"cases": 9 * 2 + 6 * 2 * 2 + 3 * 2 + 4 * 2 * 2, "wrong": []}


def test_threads_of_a_block_that_ask_at_the_same_time_get_one_shared_array() -> None:
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    class AskedAtOnce(dict[Any, Any]):
        def get(self, *_: Any) -> None:
            """Find nothing, as a thread does while another makes the array."""

    with short_turns():
        shared = FakeCUDAShared(0)
        shared._allocations = AskedAtOnce()
        first, second = (shared.array(3, np.float64) for _ in range(2))
        assert first is second and shared.array(3, np.float64) is not first


@pytest.mark.gpu
def test_kernels_of_layers_on_a_gpu_have_the_bits_of_the_reference() -> None:
    if reason := why_no_gpu():
        pytest.skip(f"no CUDA device: {reason}")
    import simulate_cuda_layers as layers

    from dpsim.comm.cuda.available import open_device
    from dpsim.comm.cuda.memory import DeviceMemory

    every = layers.checks(DeviceMemory(open_device(0)))
    assert [text for check in every if (text := check()) is not None] == []


def test_a_fused_multiply_add_is_rounded_once() -> None:
    random = np.random.default_rng(0)
    a, b, c = (random.standard_normal((3, 2000)) * 2.0 ** random.integers(-40, 40, (3, 2000))).astype(np.float32)
    c[:500] = -(a * b)[:500]
    c[500:1000] = ((a * b) * 2.0 ** random.integers(20, 30, 2000))[500:1000]
    middle = np.float32(1 + 2.0**-12)  # middle^2 is amid two float32 numbers; what is added decides, or that it is even
    a[:3], b[:3], c[:3] = middle, middle, (0, 1e-30, -1e-30)
    for left, right, added, result in zip(a, b, c, fused(a, b, c), strict=True):
        exact = Fraction(float(left)) * Fraction(float(right)) + Fraction(float(added))
        below, above = (np.nextafter(result, np.float32(side)) for side in (-np.inf, np.inf))
        error = abs(Fraction(float(result)) - exact)
        for other in (below, above):
            distance = abs(Fraction(float(other)) - exact)
            even = not result.view(np.int32) & 1
            assert error < distance or (error == distance and even)
    assert np.isnan(fused(np.float32(np.inf), np.float32(0), np.float32(1)))
    assert fused(np.float32(3e38), np.float32(2), np.float32(0)) == np.inf


def kernels() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Kernels with arguments of the types that they are called with, by a name."""
    from dpsim.kernels import batch_norm_cuda as norm
    from dpsim.kernels import column_sums_cuda, conv_cuda, elementwise_cuda

    def given(reads: int, writes: int, integers: int, floats: int = 0) -> tuple[Any, ...]:
        return (0,) * reads, (0,) * writes, (1,) * integers + (np.float32(1),) * floats

    every: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "column sums": (column_sums_cuda.column_sums("float32"), given(1, 1, 2)),
        "moments": (norm.moments(), given(1, 2, 3)),
        "local moments": (norm.local_moments(), given(2, 5, 3, 3)),
        "gradient sums": (norm.gradient_sums(), given(2, 2, 3)),
        "local gradients": (norm.local_gradients(), given(4, 4, 3, 1)),
    }
    for lanes in (1, 4):
        for spread, outputs in ((1, 8), (2, 4), (1, 1)):
            kernel = conv_cuda.convolution(3, spread, lanes, outputs)
            every[f"convolution {spread} {lanes} {outputs}"] = (kernel, given(2, 1, 8))
        every[f"weight gradient {lanes}"] = (conv_cuda.weight_gradient(3, lanes, 4), given(2, 1, 9))
        every[f"sums forward {lanes}"] = (norm.sums_of_blocks(False, False, lanes), given(1, 1, 3))
        every[f"sums backward {lanes}"] = (norm.sums_of_blocks(True, False, lanes), given(2, 1, 3))
        every[f"sums rectified {lanes}"] = (norm.sums_of_blocks(True, True, lanes), given(5, 1, 3))
        for rectified in (False, True):
            every[f"normalise {rectified} {lanes}"] = (norm.normalise(rectified, lanes), given(4, 1, 2))
            every[f"backward {rectified} {lanes}"] = (norm.backward(rectified, lanes), given(6 + rectified, 1, 2))
        every[f"rectified sum {lanes}"] = (elementwise_cuda.rectified_sum(lanes), given(2, 1, 1))
        every[f"both gradients {lanes}"] = (elementwise_cuda.both_gradients(lanes), given(2, 2, 1))
        for count in (7, 8):
            every[f"tree sum of {count} {lanes}"] = (elementwise_cuda.tree_sum(count, lanes), given(count, 1, 1))
    return every


NAMES = [
    *("column sums", "moments", "local moments", "gradient sums", "local gradients"),
    *(
        f"{name} {lanes}"
        for lanes in (1, 4)
        for name in (
            *("weight gradient", "sums forward", "sums backward", "sums rectified", "rectified sum", "both gradients"),
            *("tree sum of 7", "tree sum of 8"),
            *(f"{kind} {rectified}" for kind in ("normalise", "backward") for rectified in (False, True)),
        )
    ),
    *(f"convolution {spread} {lanes} {n}" for lanes in (1, 4) for spread, n in ((1, 8), (2, 4), (1, 1))),
]


@pytest.mark.parametrize("name", NAMES)
def test_kernels_of_layers_compile_without_spilling_and_join_no_operations_but_those_of_convolutions(name: str) -> None:
    need_a_compiler()
    text = code_of(*kernels()[name])
    for architecture in ("sm_80", "sm_90"):
        cubin, said = assembled(text, architecture)
        assert cubin[:4] == b"\x7fELF"
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
        assert int(re.findall(r"[Uu]sed (\d+) registers", said)[-1]) <= 128  # one block of 512 threads runs at least
    convolves = name.startswith(("convolution", "weight gradient"))
    assert {"fma.rn.f32"} == set(re.findall(r"fma\.\w+\.f\d+", text)) if convolves else not JOINED.findall(text)
    if name.endswith(" 4"):
        assert "ld.global.v4" in text


def test_every_kernel_is_compiled() -> None:
    assert sorted(NAMES) == sorted(kernels())


def test_the_real_numba_launches_every_kernel_of_layers_in_the_stream_of_the_memory(
    python: Callable[..., Any], tmp_path: Path
) -> None:
    """A line of the driver: kind, grid, threads, stream, the first two arguments."""
    here = Path(__file__).parents[1] / "support"
    variables = stub_driver(tmp_path) | {"PYTHONPATH": extended_path(here.parents[1], here)}
    done = python(str(here / "launch_layers_on_stub.py"), "4096", env=variables, timeout_s=100)
    assert done.returncode == 0, done.stderr
    launches = [line.split() for line in (tmp_path / "launches").read_text().splitlines()]
    assert len(launches) == 2 + 2 + 2 * 2 + 1 + 2 * 2 + 1 + 3  # sums of blocks or parts are added in a second kernel
    assert {(kind, threads, stream) for kind, _, _, threads, stream, *_ in launches} == {("plain", "512", "4096")}
