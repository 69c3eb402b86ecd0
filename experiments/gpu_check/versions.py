"""What a run of gpu_check ran on and with: looked up, never guessed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dpsim.comm.cuda.available import cupy_version, simulating
from dpsim.comm.cuda.driver import Driver
from dpsim.experiments.gpu_check.record import Gpus, Probe
from dpsim.harness.measurement.environment import version

_DRIVER = Path("/proc/driver/nvidia/version")


def gpus(driver: Driver) -> Gpus:
    """The GPUs of the driver, and the packages that use them. Creates no CUDA context."""
    packages = {"numba_cuda": version("numba-cuda"), "cupy": cupy_version()}
    if simulating():
        return Gpus(
            names=("numba's CUDA simulator",), driver="none", cuda="none", nccl="none", simulated=True, **packages
        )
    return Gpus(
        names=tuple(gpu.name for gpu in driver.gpus),
        driver=kernel_driver(),
        cuda=f"driver {driver.cuda}",
        nccl="none",
        simulated=False,
        **packages,
    )


def with_libraries(gpus: Gpus, probes: Sequence[Probe]) -> Gpus:
    """The same with the versions of CUDA's runtime and of NCCL, as far as they are probed by now."""
    by_name = {probe.name: probe for probe in probes}
    cupy, nccl = by_name.get("CuPy"), by_name.get("NCCL")
    runtime = f", {cupy.text.split(', ')[-1]}" if cupy is not None and cupy.works else ""
    found = gpus.nccl if nccl is None else nccl.text if nccl.works else f"none: {nccl.text}"
    return msgspec.structs.replace(gpus, cuda=gpus.cuda + runtime, nccl=found)


def kernel_driver() -> str:
    """The kernel driver's version, like 580.95.05; ``unknown`` where the kernel does not tell."""
    try:
        text = _DRIVER.read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return match.group() if match else "unknown"
