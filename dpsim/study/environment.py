"""The environment of a measurement: processor, versions and variables. It is described, never changed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess

from dpsim import installation, processor
from dpsim.launch import jobs
from dpsim.launch.rank_process import THREAD_VARIABLES
from dpsim.processor import LAYERS_VARIABLE
from dpsim.records.sweep import Environment

VARIABLES = ("OPENBLAS_", "OMP_", "MKL_", "NUMBA_", "MPIR_", processor.VARIABLE, LAYERS_VARIABLE)
"""Beginnings of the names of the variables that are recorded."""


def environment() -> Environment:
    """The environment of this process: versions, processor, BLAS architecture and the variables that change speed.

    The variables are those of the ranks that dpsim starts: one thread each, unless the user has set another number.
    """
    import psutil

    return Environment(
        dpsim=installation.VERSION,
        python=platform.python_version(),
        platform=platform.platform(),
        processor=processor.model(),
        cores=cores(),
        memory_bytes=psutil.virtual_memory().total,
        mpi=f"{launcher()}, mpi4py {version('mpi4py')}",
        numpy=version("numpy"),
        numba=version("numba"),
        blas=processor.blas(),
        variables={name: value for name, value in sorted(_rank_variables().items()) if name.startswith(VARIABLES)},
    )


def _rank_variables() -> dict[str, str]:
    return {name: "1" for name in THREAD_VARIABLES} | dict(os.environ) | processor.numba_variables()


def blas_threads() -> int:
    """Threads of BLAS on a rank that dpsim starts."""
    threads = _rank_variables()["OPENBLAS_NUM_THREADS"]
    return int(threads) if threads.isdigit() else 1


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version(package: str) -> str:
    """An installed package's version without importing it; ``none`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def launcher() -> str:
    """Name and version of the MPI that would start ranks, without loading it."""
    path = jobs.mpiexec_path()
    if path is None:
        return "no mpiexec"
    process = subprocess.run([path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    lines = (process.stdout or process.stderr).splitlines() or [""]
    number = re.search(r"Version:\s*(\S+)", process.stdout)
    return f"mpich {number.group(1)}" if "HYDRA" in lines[0] and number else lines[0].strip()
