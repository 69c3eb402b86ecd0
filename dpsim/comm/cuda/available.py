"""Which GPUs can be used on this machine, and why not; opens the one of a process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import warnings

import numpy as np

from dpsim.comm.cuda import driver as cuda_driver
from dpsim.comm.cuda.device import Device
from dpsim.errors import ConfigError
from dpsim.installation import install

_CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def simulating() -> bool:
    """Return whether numba's own variable asks for its CUDA simulator."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def why_no_gpu() -> str:
    """Return why no GPU can be used, in a few words; empty if a GPU can be used."""
    driver = cuda_driver.ask()
    if driver.problem:
        return driver.problem
    for package, module in ((driver.cupy_package, "cupy"), ("numba-cuda", "numba_cuda")):
        if importlib.util.find_spec(module) is None:
            return f"the Python package {package} is not installed ({install(driver.extra)})"
    return why_no_kernels() or _why_cupy_fails(driver)


def why_no_kernels() -> str:
    """Return why numba-cuda cannot compile with the installed NumPy (one without ``row_stack``), or ""."""
    if hasattr(np, "row_stack"):
        return ""
    return f"numba-cuda compiles no kernel with NumPy {np.__version__} (pip install 'numpy<2.5')"


def _why_cupy_fails(driver: cuda_driver.Driver) -> str:
    try:
        import cupy

        _ = cupy.cuda.cublas  # which CuPy loads when it is asked for
    except ImportError as error:  # libraries of CUDA are missing, or are those of another CUDA
        return f"CuPy cannot be imported: {_words(error)} (pip install '{driver.cupy_package}[ctk]')"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if "InsufficientDriver" in str(error):
            return (
                f"the driver is for CUDA {driver.cuda}, and CuPy for a newer one: {_words(error)}"
                f" ({install(driver.extra)})"
            )
        return _words(error)
    return "" if count else "CUDA sees no device"


def _words(error: Exception) -> str:
    """Return the first lines of an error, as one line."""
    return " ".join(str(error).split())[:300]


def cupy_version() -> str:
    """Return the version of the CuPy that is installed, for whatever CUDA; ``none`` without one. Imports nothing."""
    for package in _CUPY_PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def gpu_count() -> int:
    """Return how many GPUs CUDA sees, after ``check_gpu``; the simulator has 1."""
    if simulating():
        return 1
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def nccl_missing() -> str:
    """Return why CuPy cannot use NCCL; empty if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where it cannot load the library
        try:
            from cupy.cuda import nccl as library
        except ImportError as error:
            return str(error)
    return "" if library.available else f"CuPy finds no NCCL (pip install {cuda_driver.ask().nccl_package})"


def check_gpu() -> None:
    """Raise ``ConfigError`` if there is neither a GPU nor the simulator."""
    if not simulating() and (reason := why_no_gpu()):
        raise ConfigError(
            f"backend 'cuda' finds no GPU here: {reason}",
            allowed="a machine with an NVIDIA GPU and its driver, and"
            f" {install(cuda_driver.ask().extra)} for the driver's CUDA",
            remedy="use --backend cpu (the default)",
        )


def open_device(number: int) -> Device:
    """Return the device of this machine's process ``number``: processes take the GPUs in turn, or the simulator.

    Raises ``ConfigError`` if there is no GPU.
    """
    check_gpu()
    if simulating():
        from dpsim.comm.cuda.simulator import SimulatedDevice

        return SimulatedDevice()
    from dpsim.comm.cuda.gpu import Gpu

    return Gpu(number)
