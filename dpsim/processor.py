"""The processor and the BLAS that this process computes with, on which speeds and bits depend.

``DPSIM_VECTORS=avx2`` limits the code that dpsim compiles to what every processor with AVX2 has. The BLAS is not
limited by it, but by a variable of its own, such as ``OPENBLAS_CORETYPE=Haswell``.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path

from dpsim.errors import ConfigError

VARIABLE = "DPSIM_VECTORS"
"""Names the widest vector instructions that dpsim's own code may use; without it, those that the processor has."""
LAYERS_VARIABLE = "DPSIM_GPU_LAYERS"
"""With ``cupy`` in it the layers of a network are computed on GPUs by CuPy alone, without kernels of this project."""
_VECTORS = (("avx512f", "avx512"), ("avx2", "avx2"))
_LIMITED_CPU = "x86-64-v3"
"""LLVM's name for what all processors with AVX2 have: 16 registers of 32 bytes, FMA, no masks."""


@functools.cache
def limited() -> bool:
    """Return whether ``DPSIM_VECTORS=avx2`` is set. Raises ``ConfigError`` for another value, and without AVX2."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "avx2"):
        raise ConfigError(
            f"{VARIABLE}={value}",
            allowed="avx2; without the variable, dpsim uses all that the processor has",
            remedy=f"{VARIABLE}=avx2, or unset {VARIABLE}",
        )
    if value and "avx2" not in _cpuinfo("flags").split():
        raise ConfigError(
            f"{VARIABLE}=avx2 on {_name()}, which has no AVX2",
            allowed="a processor with AVX2",
            remedy=f"unset {VARIABLE}",
        )
    return bool(value)


def layers_by_kernels() -> bool:
    """Return whether kernels of this project compute layers on GPUs. Raises ``ConfigError`` for an unknown value."""
    value = os.environ.get(LAYERS_VARIABLE, "")
    if value not in ("", "cupy"):
        raise ConfigError(
            f"{LAYERS_VARIABLE}={value}",
            allowed="cupy; without the variable, kernels of dpsim compute convolutions and batch norms on GPUs",
            remedy=f"{LAYERS_VARIABLE}=cupy, or unset {LAYERS_VARIABLE}",
        )
    return not value


def target() -> tuple[str, str]:
    """Return the processor that dpsim's code is compiled for, as LLVM names it, and the features it has or lacks."""
    import llvmlite.binding as llvm

    return (_LIMITED_CPU, "") if limited() else (llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())


def numba_variables() -> dict[str, str]:
    """Return the variables that make numba compile for ``target()``; none where it does so anyway."""
    return {"NUMBA_CPU_NAME": _LIMITED_CPU, "NUMBA_CPU_FEATURES": ""} if limited() else {}


def features() -> dict[str, bool]:
    """Return which instructions dpsim's code may use, by LLVM's names of them; a name that is missing may not."""
    import llvmlite.binding as llvm

    return {"avx2": True, "fma": True} if limited() else dict(llvm.get_host_cpu_features())


@functools.cache
def model() -> str:
    """Return the processor's own name, such as ``AMD EPYC 9554``, and the limit of dpsim's code if there is one."""
    return f"{_name()}, limited to AVX2" if limited() else _name()


@functools.cache
def family() -> str:
    """Return vendor and widest vectors, such as ``GenuineIntel avx512``; elsewhere the machine, as ``aarch64``."""
    vendor, flags = _cpuinfo("vendor_id"), _cpuinfo("flags").split()
    if not vendor:
        return platform.machine()
    if limited():
        return f"{vendor} avx2"
    return f"{vendor} {next((name for flag, name in _VECTORS if flag in flags), 'sse')}"


@functools.cache
def blas() -> str:
    """Return library, version and architecture of NumPy's BLAS, such as ``openblas 0.3.31 SkylakeX``."""
    import numpy  # noqa: F401  (loads its BLAS)

    was_set = "KMP_DUPLICATE_LIB_OK" in os.environ
    import threadpoolctl

    if not was_set:  # threadpoolctl sets it when it is loaded
        os.environ.pop("KMP_DUPLICATE_LIB_OK", None)
    libraries = [library for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]
    if not libraries:
        return "unknown"
    library = next((entry for entry in libraries if "numpy" in entry["filepath"]), libraries[0])
    parts = (library["internal_api"], library["version"], library.get("architecture"))
    return " ".join(str(part) for part in parts if part)


def rounding() -> str:
    """Return this thread's rounding: ``to nearest``, ``up``, ``down`` or ``to zero``, and if subnormal numbers count.

    Libraries may change this for all code of a thread, for instance those that GCC links with ``-ffast-math``.
    """
    import numpy as np

    one, smallest_normal, subnormal = np.ones(1), np.array([1 << 23], np.uint32), np.array([1 << 20], np.uint32)
    up, down = (one + 2.0**-54)[0] > 1, (-one - 2.0**-54)[0] < -1
    nearest = (one + 0.75 * 2.0**-52)[0] > 1
    modes = ["up" if up else "down" if down else "to nearest" if nearest else "to zero"]
    if not (smallest_normal.view(np.float32) * np.float32(0.5)).view(np.uint32)[0]:
        modes.append("subnormal results flushed to zero")
    if not (subnormal.view(np.float32) * np.float32(2.0**30)).view(np.uint32)[0]:
        modes.append("subnormal operands taken for zero")
    return ", ".join(modes)


def blas_architecture() -> str:
    """Return the processor type that the BLAS runs as, such as ``SkylakeX``; ``unknown`` if it does not say."""
    parts = blas().split(" ")
    return parts[2] if len(parts) > 2 else "unknown"


def _name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str:
    """Return the first value of a key in Linux's list of processors; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else ""
