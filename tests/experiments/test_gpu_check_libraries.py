"""How gpu_check tries CUDA's libraries, as far as that goes without a GPU."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_cases import need_a_compiler, stub_driver

from dpsim.comm.cuda import nccl
from dpsim.experiments.gpu_check import libraries


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed")
def test_nvvm_is_tried_by_compiling_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    need_a_compiler()
    from numba import cuda

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
    monkeypatch.setattr(libraries.importlib, "import_module", {"cupy": module}.__getitem__)
    monkeypatch.setattr(libraries, "cupy_version", lambda: "14.2.0")
    monkeypatch.setattr(libraries, "nccl_missing", lambda: "")
    monkeypatch.setattr(libraries, "open_device", lambda number: None)
    monkeypatch.setattr(nccl, "wrong_calls", lambda comm, device: "")
    monkeypatch.setattr(nccl, "load", lambda: SimpleNamespace(get_version=lambda: 22803))
    return module


@pytest.mark.usefixtures("cupy")
def test_cupy_is_tried_by_a_sum_cublas_by_a_product_and_nccl_by_moving_data() -> None:
    assert list(libraries.cupy_steps()) == ["14.2.0, runtime 12.9", "multiplies in float32", "2.28.3"]


@pytest.mark.usefixtures("cupy")
def test_an_nccl_that_gives_wrong_data_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "wrong_calls", lambda comm, device: "all-gather" * (comm.size == 1))
    with pytest.raises(SystemExit, match="NCCL's all-gather gives other data than it should"):
        list(libraries.cupy_steps())


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
