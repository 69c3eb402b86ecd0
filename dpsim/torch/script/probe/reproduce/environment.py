"""What the bits of a training with PyTorch depend on beside the script. Loads torch."""

from __future__ import annotations

import platform
import re

import torch


def environment() -> dict[str, str]:
    """Return the versions, the processor and the settings on which PyTorch's kernels, and so the bits, depend."""
    built = torch.__config__.show()
    return {
        "PyTorch": torch.__version__,
        "processor": _processor(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "BLAS": _version(r"Math Kernel Library Version (\S+)", built) or _version(r"BLAS_INFO=([^,]*)", built),
        "oneDNN": _version(r"MKL-DNN (\S+)", built) if torch.backends.mkldnn.enabled else "off",
        "threads": str(torch.get_num_threads()),
        "deterministic algorithms": "on" if torch.are_deterministic_algorithms_enabled() else "off",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return _version(r"model name\s*: (.*)", file.read()) or platform.machine()
    except OSError:
        return platform.machine()


def _version(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1).strip() if match else ""
