"""The model that a token names: built in, or a function of the user's own in a Python file or an installed package."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dpsim.errors import ConfigError, DpsimError
from dpsim.replica import LayerSpec, Replica
from dpsim.user_code import place_of

_PYTHON = "python:"
_FUNCTION = "model"
_MEMBERS = ("layers", "initial_parameters", "bind", "state", "forward_backward", "evaluate")
_SIGNATURE = "{}(input_shape, classes) returns a dpsim.Replica"
_REMEDY = "see docs/own-model.md"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model for samples of ``input_shape`` in ``classes`` classes.

    ``source_digest``: the first 16 hexadecimal digits of the SHA-256 of the file of a user's own model; else empty.
    """

    name: str
    input_shape: tuple[int, ...]
    classes: int
    source_digest: str
    build: Callable[[], Replica]

    def replica(self) -> Replica:
        """A new replica, the same on every rank. Raises ``ConfigError`` if the user's function does not return one."""
        return self.build()


def is_own(token: str) -> bool:
    """Whether a token names a user's own model."""
    return token.startswith(_PYTHON) or token.partition(":")[0].endswith(".py")


def load(token: str, input_shape: tuple[int, ...], classes: int, *, label_smoothing: float = 0.0) -> Model:
    """The model that a token names.

    ``cnn:16,32`` and the like: a built-in model (``dpsim.nn.build_model``). ``FILE.py:FUNCTION`` and
    ``python:PACKAGE.MODULE:FUNCTION``: a function of the user's own, called with ``(input_shape, classes)``; without
    ``:FUNCTION`` it is ``model``. The file is imported under another name than ``__main__`` and may import modules from
    its folder; packages are also searched in the current folder.

    Raises ``ConfigError`` for an unknown model, and for a file or module that cannot be used.
    """
    digest = ""
    build: Callable[[], Replica]
    if is_own(token):
        if label_smoothing:
            raise ConfigError(
                f"label smoothing {label_smoothing} with the model {token}, which computes its own loss",
                allowed="--label-smoothing with a built-in model",
                remedy="leave --label-smoothing out, and smooth the labels in the model",
            )
        module, function, digest = _imported(token)
        build = functools.partial(_built, token, module, function, input_shape, classes)
    else:
        from dpsim.nn.models import build_model

        build = functools.partial(build_model, token, input_shape, classes, label_smoothing=label_smoothing)
    return Model(name=token, input_shape=input_shape, classes=classes, source_digest=digest, build=build)


def source_digest(token: str) -> str:
    """``Model.source_digest`` of a token. Imports a user's own model. Raises ``ConfigError`` as ``load``."""
    return _imported(token)[2] if is_own(token) else ""


def _imported(token: str) -> tuple[ModuleType, str, str]:
    """The module of a user's own model, the name of the function in it, and the digest of its file."""
    place, _, function = token.removeprefix(_PYTHON).partition(":")
    function = function or _FUNCTION
    if token.startswith(_PYTHON):
        module = _module(token, place, function)
        file = inspect.getsourcefile(module)
        digest = _digest(Path(file)) if file is not None else ""
    else:
        path = Path(place)
        if not path.is_file():
            raise ConfigError(
                f"model {token!r}: there is no such file", allowed="the path of a Python file", remedy=_REMEDY
            )
        digest = _digest(path)
        with _explained(token, function):
            module = _module_of_file(str(path.resolve()), digest)
    if not callable(getattr(module, function, None)):
        raise ConfigError(
            f"model {token!r}: {place} has no function {function!r}",
            allowed=f"a function: {_SIGNATURE.format(function)}",
            remedy=f"write it, or name another function: {token.removesuffix(':' + function)}:FUNCTION",
        )
    return module, function, digest


def _module(token: str, name: str, function: str) -> ModuleType:
    """An installed module, or one in the current folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    with _explained(token, function):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(
                f"there is no module {name!r}",
                allowed="a module of an installed package, or in the current folder",
                remedy="install the package, or name a file: FILE.py:FUNCTION",
            ) from None


@functools.cache
def _module_of_file(path: str, digest: str) -> ModuleType:
    """The module of a file, imported once for each content of it."""
    name = f"dpsim_model_{Path(path).stem}_{digest}"
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


def _built(token: str, module: ModuleType, function: str, input_shape: tuple[int, ...], classes: int) -> Replica:
    with _explained(token, function):
        replica = getattr(module, function)(input_shape, classes)
        if missing := [name for name in _MEMBERS if not hasattr(replica, name)]:
            kind = "None" if replica is None else f"an object of type {type(replica).__name__}"
            raise ConfigError(
                f"{function} returned {kind} without {', '.join(missing)}",
                allowed="a dpsim.Replica, such as a dpsim.FunctionReplica",
                remedy=_REMEDY,
            )
        layers = tuple(replica.layers)
        if not all(isinstance(layer, LayerSpec) for layer in layers) or not any(layer.tensors for layer in layers):
            raise ConfigError(
                f"the layers of the replica are {layers!r:.200}",
                allowed="a tuple of dpsim.LayerSpec, at least one of them with tensors",
                remedy=_REMEDY,
            )
    result: Replica = replica
    return result


@contextlib.contextmanager
def _explained(token: str, function: str) -> Iterator[None]:
    """Raise ``ConfigError`` for an exception in a user's module, with its place there."""
    try:
        yield
    except DpsimError as error:
        given = f"model {token!r}{_place(error)}: {error.given}"
        raise ConfigError(given, allowed=error.allowed, remedy=error.remedy) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"model {token!r}{_place(error)}: {type(error).__name__}: {error}",
            allowed=f"a module that can be imported, and whose function {_SIGNATURE.format(function)}",
            remedy=_REMEDY,
        ) from error


def _place(error: BaseException) -> str:
    place = place_of(error)
    return f", {place}" if place else ""


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
