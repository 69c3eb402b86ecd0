"""The processor and the BLAS that this process computes with, on which speeds and bits depend."""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path

_VECTORS = (("avx512f", "avx512"), ("avx2", "avx2"))


@functools.cache
def model() -> str:
    """The processor's own name, such as ``AMD EPYC 9554``."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


@functools.cache
def family() -> str:
    """Vendor and widest vector instructions, such as ``GenuineIntel avx512``; elsewhere the machine, as ``aarch64``."""
    vendor, flags = _cpuinfo("vendor_id"), _cpuinfo("flags").split()
    if not vendor:
        return platform.machine()
    return f"{vendor} {next((name for flag, name in _VECTORS if flag in flags), 'sse')}"


@functools.cache
def blas() -> str:
    """Library, version and architecture of the BLAS that NumPy computes with, such as ``openblas 0.3.31 SkylakeX``."""
    import numpy  # noqa: F401  (loads its BLAS)

    given = "KMP_DUPLICATE_LIB_OK" in os.environ
    import threadpoolctl

    if not given:  # threadpoolctl sets it when it is loaded
        os.environ.pop("KMP_DUPLICATE_LIB_OK", None)
    libraries = [library for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]
    if not libraries:
        return "unknown"
    library = next((entry for entry in libraries if "numpy" in entry["filepath"]), libraries[0])
    parts = (library["internal_api"], library["version"], library.get("architecture"))
    return " ".join(str(part) for part in parts if part)


def blas_architecture() -> str:
    """The processor type that the BLAS takes this one for, such as ``SkylakeX``; ``unknown`` if it does not say."""
    parts = blas().split(" ")
    return parts[2] if len(parts) > 2 else "unknown"


def _cpuinfo(key: str) -> str:
    """The first value of a key in Linux's list of processors; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else ""
