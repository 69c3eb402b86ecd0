"""How gpu_check tries CUDA's libraries, as far as that goes without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_cases import stub_driver

from dpsim.experiments.gpu_check import libraries


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed")
def test_nvvm_is_tried_by_compiling_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda import pathfinder
    from numba import cuda

    try:
        pathfinder.load_nvidia_dynamic_lib("nvvm")
    except pathfinder.DynamicLibNotFoundError:
        pytest.skip("CUDA's nvvm is not installed: pip install 'dpsim[ptx]'")
    monkeypatch.setattr(cuda, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))
    versions, compiled = itertools.islice(libraries.numba_steps(), 2)
    assert "cuda-bindings" in versions and compiled == "compiles for sm_90"


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed")
def test_a_driver_that_runs_no_kernel_is_told_after_what_works(python: Callable[..., Any], tmp_path: Path) -> None:
    done = python("-W", "ignore", "-m", libraries.__name__, "numba", env=stub_driver(tmp_path))
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [name for name, _ in lines] == ["numba-cuda", "NVVM"] and lines[1][1] == "compiles for sm_90", done.stderr
    assert (done.returncode, done.stderr) == (1, "the kernel ran and did not write what it should\n")
    (launch,) = (tmp_path / "launches").read_text().splitlines()
    assert launch.startswith("extended 1 1 32 ")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy over NumPy."""
    module: Any = ModuleType("cupy")
    module.arange = np.arange
    module.cuda = SimpleNamespace(runtime=SimpleNamespace(runtimeGetVersion=lambda: 12090))
    nccl = SimpleNamespace(get_version=lambda: 22803)
    modules = {"cupy": module, "cupy.cuda.nccl": nccl}
    monkeypatch.setattr(libraries.importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(libraries, "cupy_version", lambda: "14.2.0")
    monkeypatch.setattr(libraries, "nccl_missing", lambda: "")
    monkeypatch.setattr(libraries, "open_device", lambda number: None)
    monkeypatch.setattr(libraries, "nccl_alone", lambda device: None)
    return module


@pytest.mark.usefixtures("cupy")
def test_cupy_is_tried_by_a_sum_cublas_by_a_product_and_nccl_by_moving_data() -> None:
    assert list(libraries.cupy_steps()) == ["14.2.0, runtime 12.9", "multiplies in float32", "2.28.3"]


@pytest.mark.usefixtures("cupy")
def test_a_missing_nccl_ends_the_steps_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "nccl_missing", lambda: "CuPy finds no NCCL")
    with pytest.raises(SystemExit, match="CuPy finds no NCCL"):
        list(libraries.cupy_steps())


def test_a_cupy_that_computes_nonsense_does_not_work(cupy: Any) -> None:
    cupy.arange = np.zeros
    with pytest.raises(SystemExit, match="wrong sum"):
        next(libraries.cupy_steps())


@pytest.mark.usefixtures("cupy")
def test_a_cublas_that_cannot_be_loaded_ends_the_steps_after_cupy(cupy: Any) -> None:
    class Array:
        def reshape(self, *shape: int) -> Array:
            return self

        def __pow__(self, power: int) -> Any:
            return np.arange(100) ** power

        def __matmul__(self, other: Array) -> Array:
            raise ImportError("libcublas.so.13: cannot open shared object file")

    cupy.arange = lambda *given, **options: Array()
    steps = libraries.cupy_steps()
    assert next(steps).startswith("14.2.0")
    with pytest.raises(ImportError, match="libcublas"):
        next(steps)


class OneRank:
    """CuPy's interface to NCCL between a rank and itself, on host memory. ``broken``: a call that moves nothing."""

    NCCL_UINT8, NCCL_FLOAT32, NCCL_SUM = 1, 7, 0

    def __init__(self, broken: str = "") -> None:
        self.broken, self.sent = broken, list[int]()

    def get_unique_id(self) -> bytes:
        return bytes(128)

    def NcclCommunicator(self, ranks: int, identity: bytes, rank: int) -> OneRank:
        assert (ranks, identity, rank) == (1, bytes(128), 0)
        return self

    def groupStart(self) -> None:
        self.sent.clear()

    def groupEnd(self) -> None:
        assert self.sent == []

    def allReduce(self, source: int, target: int, count: int, kind: int, operation: int, stream: int) -> None:
        assert (kind, operation, stream) == (self.NCCL_FLOAT32, self.NCCL_SUM, 0)
        self._move("all-reduce", source, target, 4 * count)

    def allGather(self, own: int, first: int, count: int, kind: int, stream: int) -> None:
        self._move("all-gather", own, first, count)

    def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        self.sent.append(address)

    def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._move("send and receive", self.sent.pop(), address, count)

    def check_async_error(self) -> None:
        pass

    def destroy(self) -> None:
        pass

    def _move(self, call: str, source: int, target: int, size_bytes: int) -> None:
        if call != self.broken:
            ctypes.memmove(target, source, size_bytes)


@pytest.mark.parametrize("broken", ["", "all-reduce", "all-gather", "send and receive"])
def test_nccl_is_tried_by_every_call_that_training_makes(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba_cuda")
    from dpsim.comm.cuda import nccl
    from dpsim.comm.cuda.simulator import SimulatedDevice

    monkeypatch.setattr(nccl, "address_of", lambda array: array.ctypes.data)
    if not broken:
        libraries.nccl_alone(SimulatedDevice(), OneRank())
        return
    with pytest.raises(SystemExit, match=f"NCCL's {broken} gives other data"):
        libraries.nccl_alone(SimulatedDevice(), OneRank(broken))


def test_steps_are_printed_with_their_names_as_they_are_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def steps() -> Iterator[str]:
        yield "1.0"
        assert capsys.readouterr().out == "first\t1.0\n"
        yield "2.0"

    monkeypatch.setitem(libraries.GROUPS, "two", (("first", "second"), steps))
    libraries.main("two")
    assert capsys.readouterr().out == "second\t2.0\n"
