"""Functions of a user's own: importing them, where an exception arose in them, and what it says."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dpsim.errors import ConfigError, DpsimError, is_missing

_PYTHON = "python:"

_IGNORED = (str(Path(__file__).parent), "<frozen", importlib.__path__[0], contextlib.__file__)


def place_of(error: BaseException, *others: str) -> str:
    """Return ``own.py, line 3``: the innermost line outside dpsim, the import system, and the folders ``others``.

    Empty if there is none.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{Path(error.filename).name}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((*_IGNORED, *others))]
    return f"{Path(outside[-1].filename).name}, line {outside[-1].lineno}" if outside else ""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The function that a token has to name, for messages: a ``model``, its ``default`` name, and its signature."""

    noun: str
    default: str
    signature: str
    remedy: str


def is_function(token: str) -> bool:
    """Return whether a token is ``FILE.py:FUNCTION`` or ``python:PACKAGE.MODULE:FUNCTION``."""
    return token.startswith(_PYTHON) or token.partition(":")[0].endswith(".py")


def imported(token: str, expected: Expected) -> tuple[ModuleType, str, str]:
    """Return the module of a user's function, the function's name in it, and the first 16 digits of its file's SHA-256.

    ``python:`` may be missing where ``token`` can name nothing else. Raises ``ConfigError`` for a file or module that
    cannot be used.
    """
    source, _, function = token.removeprefix(_PYTHON).partition(":")
    function = function or expected.default
    if not source.endswith(".py") or token.startswith(_PYTHON):
        module = _module(token, source, function, expected)
        file = inspect.getsourcefile(module)
        digest = _digest(Path(file)) if file is not None else ""
    else:
        path = Path(source)
        if not path.is_file():
            raise ConfigError(
                f"{expected.noun} {token!r}: there is no such file",
                allowed="the path of a Python file",
                remedy=expected.remedy,
            )
        digest = _digest(path)
        with explained(token, function, expected):
            module = _module_of_file(str(path.resolve()), digest)
    if not callable(getattr(module, function, None)):
        raise ConfigError(
            f"{expected.noun} {token!r}: {source} has no function {function!r}",
            allowed=f"a function: {expected.signature.format(function)}",
            remedy=f"write it, or name another function: {token.removesuffix(':' + function)}:FUNCTION",
        )
    return module, function, digest


@contextlib.contextmanager
def explained(token: str, function: str, expected: Expected) -> Iterator[None]:
    """Raise ``ConfigError`` for an exception in a user's module, with its place there."""
    try:
        yield
    except DpsimError as error:
        message = f"{expected.noun} {token!r}{_place(error)}: {error.given}"
        raise ConfigError(message, allowed=error.allowed, remedy=error.remedy) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{expected.noun} {token!r}{_place(error)}: {type(error).__name__}: {error}",
            allowed=f"a module that can be imported, and whose function {expected.signature.format(function)}",
            remedy=expected.remedy,
        ) from error


def _module(token: str, name: str, function: str, expected: Expected) -> ModuleType:
    """Return an installed module, or one in the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    with explained(token, function, expected):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not is_missing(name, error):
                raise
            raise ConfigError(
                f"there is no module {name!r}",
                allowed="a module of an installed package, or in the current folder",
                remedy="install the package, or name a file: FILE.py:FUNCTION",
            ) from None


@functools.cache
def _module_of_file(path: str, digest: str) -> ModuleType:
    """Return the module of a file, imported once for each content of it."""
    name = f"dpsim_user_{Path(path).stem}_{digest}"
    if (folder := str(Path(path).parent)) not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _place(error: BaseException) -> str:
    location = place_of(error)
    return f", {location}" if location else ""


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
