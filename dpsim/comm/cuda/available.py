"""Which GPUs can be used on this machine, and why not; opens the one of a process."""

from __future__ import annotations

import importlib.util
import os
import warnings

from dpsim.comm.cuda.device import Device
from dpsim.errors import ConfigError


def simulating() -> bool:
    """Whether numba's own variable asks for its CUDA simulator."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def why_no_gpu() -> str:
    """Why no GPU can be used, in a few words; empty if a GPU can be used."""
    for package, module in (("cupy-cuda13x", "cupy"), ("numba-cuda", "numba_cuda")):
        if importlib.util.find_spec(module) is None:
            return f"the Python package {package} is not installed"
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
    return "" if count else "CUDA sees no device"


def gpu_count() -> int:
    """How many GPUs CUDA sees, after ``check_gpu``; the simulator has 1."""
    if simulating():
        return 1
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def nccl_missing() -> str:
    """Why CuPy cannot use NCCL; empty if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where it cannot load the library
        try:
            from cupy.cuda import nccl as library
        except ImportError as error:
            return str(error)
    return "" if library.available else "CuPy finds no NCCL (pip install nvidia-nccl-cu13)"


def check_gpu() -> None:
    """Raises ``ConfigError`` if there is neither a GPU nor the simulator."""
    if not simulating() and (reason := why_no_gpu()):
        raise ConfigError(
            f"backend 'cuda' finds no GPU here: {reason}",
            allowed="a machine with an NVIDIA GPU and its driver, and pip install 'dpsim[cuda]'",
            remedy="use --backend cpu (the default)",
        )


def open_device(number: int) -> Device:
    """The device of the ``number``-th process of this machine: processes take the GPUs in turn, or the simulator.

    Raises ``ConfigError`` if there is no GPU.
    """
    check_gpu()
    if simulating():
        from dpsim.comm.cuda.simulator import SimulatedDevice

        return SimulatedDevice()
    from dpsim.comm.cuda.gpu import Gpu

    return Gpu(number)
