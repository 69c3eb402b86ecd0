"""Launches allreduce kernels with the real numba-cuda on the driver that ``stub_libcuda.c`` stands in for.

``python launch_on_stub.py STREAM VERSION MODE ...``
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import cuda

from dpsim.kernels.allreduce import registry
from dpsim.kernels.allreduce.tree import slots

RANKS, ELEMENTS = 2, 1 << 16


def main(address: int, cases: list[str]) -> None:
    """Launch every stage of each version in its mode on the stream at ``address``."""
    versions = {version.name: version for version in registry.versions("cuda")}
    arrays: list[Any] = [cuda.to_device(np.zeros(ELEMENTS, np.float32)) for _ in range(RANKS)]
    for name, mode in zip(cases[::2], cases[1::2], strict=True):
        launch = versions[name].make(arrays, slots(range(RANKS + 1)), mode=mode)
        for stage in launch.stages:
            stage(cuda.external_stream(address))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
