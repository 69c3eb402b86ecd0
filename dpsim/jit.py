"""Functions that numba compiles when they are first called, and keeps compiled where there is a folder to keep them in.

Loading numba takes longer than anything else at the start of a command, and many commands never call such a function.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

from dpsim import processor
from dpsim.errors import ConfigError


class Compiled:
    """``numba.njit`` of a function, without Python's lock, from numba's cache on disk.

    Where numba finds no folder that can be written to (an installation of another user's, no home), every process
    compiles for itself.
    """

    def __init__(self, function: Callable[..., Any], *, inline: str = "never") -> None:
        functools.update_wrapper(self, function)
        self.py_func = function
        """The same function, not compiled; numba calls it so, too."""
        self._inline = inline
        self._dispatcher: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self.dispatcher()(*arguments)

    def dispatcher(self) -> Any:
        """What numba makes of the function; the compiled functions that it calls become what numba knows, too."""
        if self._dispatcher is None:
            self._dispatcher = _njit(self.py_func, self._inline)
            names = self.py_func.__globals__
            for name, value in list(names.items()):
                if isinstance(value, Compiled):
                    names[name] = value.dispatcher()
        return self._dispatcher


jit = Compiled
_FROZEN = (int, float, str, tuple)


def quickest(function: Compiled, *, few: bool) -> Callable[..., Any]:
    """The function itself for ``few`` numbers while numba is not loaded (loading it takes longer), else compiled."""
    return function.py_func if few and "numba" not in sys.modules else function


def keeps() -> bool:
    """Whether compiled functions are kept for the next process."""
    njit: Any = load_numba().njit
    try:
        njit(_nothing).enable_caching()
    except RuntimeError:
        return False
    return True


@functools.cache
def load_numba() -> Any:
    """Return numba, set to compile for ``processor.target()``.

    Raises ``ConfigError`` if it is limited to AVX2 and has begun to compile for the whole processor in this process.
    """
    variables = processor.numba_variables()
    os.environ.update(variables)
    import numba

    if variables:
        from numba.core import registry

        reload: Any = numba.config.reload_config
        reload()
        if registry.cpu_target.target_context.codegen()._tm_features != variables["NUMBA_CPU_FEATURES"]:
            raise ConfigError(
                f"{processor.VARIABLE}=avx2, but this process compiled functions with numba before dpsim did",
                allowed="numba limited from its first function on",
                remedy=f"also set {' '.join(f'{name}={value}' for name, value in variables.items())}",
            )
    return numba


def _njit(function: Callable[..., Any], inline: str) -> Any:
    njit: Any = load_numba().njit  # its types do not connect a function and its cache
    compiled = njit(nogil=True, inline=inline)(function)
    with contextlib.suppress(RuntimeError):  # "no locator available"
        compiled.enable_caching()
        index = compiled._cache._cache_file
        index._source_stamp = (index._source_stamp, _fingerprint(function))
    return compiled


def _fingerprint(function: Callable[..., Any]) -> str:
    """A digest of what numba freezes into compiled code: the function's own code, and what it takes from its globals.

    Numba's cache only notices changes of the function's own file, not of a constant or a function that it imports.
    """
    code, names = function.__code__, function.__globals__
    digest = hashlib.sha256(code.co_code)
    digest.update(repr([each for each in code.co_consts if isinstance(each, _FROZEN)]).encode())
    for name in sorted({*code.co_names} & names.keys()):
        value = names[name]
        inner = getattr(value, "py_func", None)
        if inner is not None and inner is not function:
            digest.update(_fingerprint(inner).encode())
        elif isinstance(value, _FROZEN):
            digest.update(f"{name}={value!r};".encode())
    return digest.hexdigest()


def _nothing() -> None:
    pass
