"""What a run of gpu_check ran on and with: looked up, never guessed."""

from __future__ import annotations

import re
from pathlib import Path

from dpsim.comm.cuda.available import nccl_missing, simulating
from dpsim.experiments.gpu_check.record import Gpus
from dpsim.harness.measurement.environment import version

_DRIVER = Path("/proc/driver/nvidia/version")


def gpus() -> Gpus:
    """The GPUs that this process sees, their driver, and the packages that use them."""
    packages = {"numba_cuda": version("numba-cuda"), "cupy": version("cupy-cuda13x")}
    if simulating():
        return Gpus(
            names=("numba's CUDA simulator",), driver="none", cuda="none", nccl="none", simulated=True, **packages
        )
    import cupy

    runtime = cupy.cuda.runtime
    names = tuple(runtime.getDeviceProperties(n)["name"].decode() for n in range(runtime.getDeviceCount()))
    cuda = f"driver {_dotted(runtime.driverGetVersion())}, runtime {_dotted(runtime.runtimeGetVersion())}"
    return Gpus(names=names, driver=driver(), cuda=cuda, nccl=nccl(), simulated=False, **packages)


def driver() -> str:
    """The kernel driver's version, like 580.95.05; ``unknown`` where the kernel does not tell."""
    try:
        text = _DRIVER.read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return match.group() if match else "unknown"


def nccl() -> str:
    """NCCL's version where CuPy sees one; else why it does not."""
    if reason := nccl_missing():
        return f"none: {reason}"
    from cupy.cuda import nccl as library

    number = int(library.get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _dotted(number: int) -> str:
    """13.1 of CUDA's 13010."""
    return f"{number // 1000}.{number % 1000 // 10}"
