"""How gpu_check tries CUDA's libraries, as far as that goes without a GPU."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

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
    return module


@pytest.mark.usefixtures("cupy")
def test_cupy_is_tried_by_a_sum_and_nccl_by_its_version() -> None:
    assert list(libraries.cupy_steps()) == ["14.2.0, runtime 12.9", "2.28.3"]


@pytest.mark.usefixtures("cupy")
def test_a_missing_nccl_ends_the_steps_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "nccl_missing", lambda: "CuPy finds no NCCL")
    with pytest.raises(SystemExit, match="CuPy finds no NCCL"):
        list(libraries.cupy_steps())


def test_a_cupy_that_computes_nonsense_does_not_work(cupy: Any) -> None:
    cupy.arange = np.zeros
    with pytest.raises(SystemExit, match="wrong sum"):
        next(libraries.cupy_steps())


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
