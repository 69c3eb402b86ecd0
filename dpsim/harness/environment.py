"""``environment``: where a measurement is taken. Looks, and changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import dpsim
from dpsim.comm import launch
from dpsim.record import Environment

VARIABLES = ("OPENBLAS_", "OMP_", "MKL_", "NUMBA_", "MPIR_")


def environment() -> Environment:
    """This process's environment: versions, processor, BLAS architecture and the variables that change speed.

    The variables are those of the ranks that dpsim starts: one thread each unless the user says otherwise.
    """
    import psutil

    return Environment(
        dpsim=dpsim.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        processor=_processor(),
        cores=cores(),
        memory_bytes=psutil.virtual_memory().total,
        mpi=f"{launcher()}, mpi4py {version('mpi4py')}",
        numpy=version("numpy"),
        numba=version("numba"),
        blas=blas(),
        variables={name: value for name, value in sorted(_of_ranks().items()) if name.startswith(VARIABLES)},
    )


def _of_ranks() -> dict[str, str]:
    return {name: "1" for name in launch.THREAD_PINS} | dict(os.environ)


def stamp() -> str:
    """The present time in UTC, to the millisecond, as records carry it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version(package: str) -> str:
    """An installed package's version without importing it; ``none`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def blas() -> str:
    """Library, version and architecture of the BLAS that NumPy computes with."""
    import numpy  # noqa: F401  (loads its BLAS)

    given = "KMP_DUPLICATE_LIB_OK" in os.environ
    import threadpoolctl

    if not given:  # threadpoolctl sets it when it is loaded
        os.environ.pop("KMP_DUPLICATE_LIB_OK", None)
    found = [library for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]
    if not found:
        return "unknown"
    library = next((one for one in found if "numpy" in one["filepath"]), found[0])
    parts = (library["internal_api"], library["version"], library.get("architecture"))
    return " ".join(str(part) for part in parts if part)


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def launcher() -> str:
    """Name and version of the MPI whose ``mpiexec`` would start ranks here, without loading MPI."""
    path = launch.mpiexec_path()
    if path is None:
        return "no mpiexec"
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    lines = (shown.stdout or shown.stderr).splitlines() or [""]
    number = re.search(r"Version:\s*(\S+)", shown.stdout)
    return f"mpich {number.group(1)}" if "HYDRA" in lines[0] and number else lines[0].strip()
