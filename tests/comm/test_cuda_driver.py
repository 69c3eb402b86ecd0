"""The NVIDIA driver asked through its library, which is here one of the test's own; and what follows for packages."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_processes import why_memory_is_not_shared, why_processes_cannot_share_gpus

from dpsim.comm.cuda import available
from dpsim.comm.cuda import driver as cuda_driver
from dpsim.comm.cuda.driver import Driver, DriverGpu, ask
from dpsim.errors import ConfigError

PROHIBITED, EXCLUSIVE_PROCESS = 2, 3


@dataclass
class Libcuda:
    """The functions of libcuda that are called. ``modes``: the compute mode of each GPU; ``apart``: no peer access."""

    version: int = 13000
    modes: list[int] = field(default_factory=lambda: [0])
    apart: tuple[tuple[int, int], ...] = ()
    status: int = 0

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDriverGetVersion(self, number: Any) -> int:
        return self._write(number, self.version)

    def cuDeviceGetCount(self, number: Any) -> int:
        return self._write(number, len(self.modes))

    def cuDeviceGet(self, handle: Any, number: int) -> int:
        return self._write(handle, 100 + number)

    def cuDeviceGetName(self, name: Any, size: int, handle: int) -> int:
        name.value = f"GPU {handle - 100}".encode()
        return 0

    def cuDeviceGetAttribute(self, number: Any, attribute: int, handle: int) -> int:
        return self._write(number, {20: self.modes[handle - 100], 75: 9, 76: 0}[attribute])

    def cuDeviceCanAccessPeer(self, number: Any, device: int, peer: int) -> int:
        return self._write(number, int((device - 100, peer - 100) not in self.apart))

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = {100: b"CUDA_ERROR_NO_DEVICE"}.get(status)
        return 0

    def _write(self, number: Any, value: int) -> int:
        number._obj.value = value
        return 0


def test_the_driver_tells_its_cuda_and_its_gpus() -> None:
    driver = ask(lambda: Libcuda(version=12040, modes=[0, EXCLUSIVE_PROCESS]))
    assert (driver.problem, driver.cuda, driver.peer_access, driver.exclusive) == ("", "12.4", True, True)
    assert driver.gpus == (
        DriverGpu(name="GPU 0", capability=(9, 0)),
        DriverGpu(name="GPU 1", capability=(9, 0), exclusive=True),
    )


@pytest.mark.parametrize(
    ("version", "packages"),
    [
        (12000, ("cuda12", "cupy-cuda12x", "nvidia-nccl-cu12")),
        (12090, ("cuda12", "cupy-cuda12x", "nvidia-nccl-cu12")),
        (13000, ("cuda13", "cupy-cuda13x", "nvidia-nccl-cu13")),
        (14020, ("cuda13", "cupy-cuda13x", "nvidia-nccl-cu13")),
        (0, ("cuda13", "cupy-cuda13x", "nvidia-nccl-cu13")),
    ],
)
def test_packages_fit_the_driver(version: int, packages: tuple[str, ...]) -> None:
    driver = Driver(cuda_version=version)
    assert (driver.extra, driver.cupy_package, driver.nccl_package) == packages


@pytest.mark.parametrize(
    ("library", "problem"),
    [
        (Libcuda(version=11080), "the driver is for CUDA 11.8; CUDA 12 is needed"),
        (Libcuda(status=100), "the driver answers CUDA_ERROR_NO_DEVICE"),
        (Libcuda(status=7), "the driver answers error 7"),
        (Libcuda(modes=[]), "the driver sees no GPU"),
        (Libcuda(modes=[PROHIBITED]), "every GPU is in the compute mode PROHIBITED"),
    ],
)
def test_why_no_gpu_can_be_used_is_said_in_words(library: Libcuda, problem: str) -> None:
    assert ask(lambda: library).problem.startswith(problem)


def test_without_a_driver_there_is_no_gpu() -> None:
    def load() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    assert ask(load) == Driver(problem="no NVIDIA driver (libcuda.so.1)")


def test_one_pair_of_gpus_without_peer_access_is_enough_to_share_no_memory() -> None:
    near, apart = ask(lambda: Libcuda(modes=[0, 0, 0])), ask(lambda: Libcuda(modes=[0, 0, 0], apart=((2, 0),)))
    assert why_memory_is_not_shared(near) == ""
    assert "do not reach each other's memory" in why_memory_is_not_shared(apart)


def test_no_second_process_is_started_on_a_gpu_for_one_process() -> None:
    assert why_processes_cannot_share_gpus(ask(lambda: Libcuda())) == ""
    exclusive = ask(lambda: Libcuda(modes=[EXCLUSIVE_PROCESS]))
    assert "EXCLUSIVE_PROCESS" in why_processes_cannot_share_gpus(exclusive)


def test_as_a_program_it_needs_only_the_standard_library_and_ends_with_2_without_a_gpu() -> None:
    if not ask().problem:
        pytest.skip("this machine has a GPU")
    path = Path(cuda_driver.__file__)
    done = subprocess.run([sys.executable, "-I", "-S", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"gpu-check: there is no GPU to check here: {ask().problem}\n"


def test_as_a_program_it_prints_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cuda_driver, "ask", lambda: Driver(cuda_version=12040))
    assert cuda_driver.main() == 0
    assert capsys.readouterr().out == "cuda12\n"


class RuntimeFails(Exception):
    pass


def cupy_that_says(message: str) -> Any:
    def count() -> int:
        raise RuntimeFails(message)

    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(
        cublas=None, runtime=SimpleNamespace(getDeviceCount=count, CUDARuntimeError=RuntimeFails)
    )
    return cupy


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver for CUDA 12.4, and every package, with a NumPy that numba-cuda knows."""
    driver = Driver(cuda_version=12040, gpus=(DriverGpu(name="GPU", capability=(9, 0)),))
    monkeypatch.setattr(cuda_driver, "ask", lambda: driver)
    monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(available.np, "row_stack", np.vstack, raising=False)


@pytest.mark.usefixtures("installed")
def test_a_numpy_with_which_no_kernel_compiles_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(available.np, "row_stack")
    monkeypatch.setattr(available.np, "__version__", "2.5.2")
    with pytest.raises(ConfigError) as refused:
        available.open_device(0)
    assert "numba-cuda compiles no kernel with NumPy 2.5.2" in str(refused.value)
    assert "pip install 'numpy<2.5'" in str(refused.value)


@pytest.mark.usefixtures("installed")
def test_a_cupy_for_a_newer_cuda_is_named_with_the_right_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    says = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
    monkeypatch.setitem(sys.modules, "cupy", cupy_that_says(says))
    reason = available.why_no_gpu()
    assert "the driver is for CUDA 12.4" in reason and "pip install -e '.[cuda12]'" in reason


LOADS = "raise ImportError('{}: cannot open\\n shared object file')\n"
LOADS_LATE = "class cuda:\n    @property\n    def cublas(self): " + LOADS + "cuda = cuda()\n"


@pytest.mark.parametrize(("library", "code"), [("libnvrtc.so.12", LOADS), ("libcublas.so.12", LOADS_LATE)])
@pytest.mark.usefixtures("installed")
def test_a_cupy_whose_libraries_are_missing_is_no_traceback(
    library: str, code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cupy.py").write_text(code.format(library))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    expected = f"CuPy cannot be imported: {library}: cannot open shared object file (pip install 'cupy-cuda12x[ctk]')"
    assert available.why_no_gpu() == expected


def test_a_missing_cupy_is_named_for_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "ask", lambda: Driver(cuda_version=12040))
    monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: None)
    assert available.why_no_gpu() == "the Python package cupy-cuda12x is not installed (pip install -e '.[cuda12]')"
