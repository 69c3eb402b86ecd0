"""Functions that numba compiles, and keeps compiled where there is a folder to keep them in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numba

_njit: Any = numba.njit  # its types leave no way from a function to a cache


def jit(function: Callable[..., Any], *, inline: str = "never") -> Any:
    """``numba.njit`` without Python's lock, from numba's cache on disk.

    Where numba finds no folder that can be written to (an installation of another user's, no home), every process
    compiles for itself.
    """
    compiled = _njit(nogil=True, inline=inline)(function)
    with contextlib.suppress(RuntimeError):  # "no locator available"
        compiled.enable_caching()
    return compiled


def keeps() -> bool:
    """Whether compiled functions are kept for the next process."""
    try:
        _njit(_nothing).enable_caching()
    except RuntimeError:
        return False
    return True


def _nothing() -> None:
    pass
