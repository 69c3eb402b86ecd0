"""Settings of the GPU's libraries with which training in leaves has the same bits on any number of GPUs.

They are variables of the environment, which the libraries read when they are loaded or first used: so they are set on
every rank before CuPy is imported. This module imports nothing of CUDA.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container, MutableMapping

from dpsim.errors import ConfigError
from dpsim.processor import LAYERS_VARIABLE

REQUIRED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUPY_ACCELERATORS": ""}
"""cuBLAS chooses its code by the workspace that it has, of one size then; and CuPy leaves out CUB, which divides a sum
by its length."""

DEFAULTS = {"CUPY_TF32": "0"}
"""What a user may set otherwise: products are in float32 unless TF32 is asked for."""


def fix_libraries(environment: MutableMapping[str, str] = os.environ, imported: Container[str] = sys.modules) -> None:
    """Set the variables of this process.

    Raises ``ConfigError`` where the user has set another value, or where CuPy was imported without them.
    """
    for name, value in REQUIRED.items():
        setting = environment.get(name)
        if setting is None and "cupy" in imported:
            raise ConfigError(
                f"reproducible training on GPUs after CuPy was imported without {name}={value}",
                allowed="CuPy's import after the training was opened, or with that variable",
                remedy=f"set {name}={value} in the environment of Python",
            )
        if setting not in (None, value):
            raise ConfigError(
                f"{name}={setting} in reproducible training on GPUs",
                allowed=f"{name}={value}, with which bits do not depend on how many GPUs there are",
                remedy=f"unset {name}; dpsim sets it on every rank",
            )
    for name, value in {**REQUIRED, **DEFAULTS}.items():
        environment.setdefault(name, value)


def settings(environment: MutableMapping[str, str] = os.environ) -> str:
    """Return the variables as they are, for a record, and that which says what computes layers."""
    names = (*REQUIRED, *DEFAULTS, LAYERS_VARIABLE)
    return ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
