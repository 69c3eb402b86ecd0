"""The model that a token names: built in, or a function of the user's own in a Python file or an installed package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from dpsim import user_code
from dpsim.errors import ConfigError
from dpsim.replica import LayerSpec, Replica

_MEMBERS = ("layers", "initial_parameters", "bind", "state", "forward_backward", "evaluate")
_EXPECTED = user_code.Expected(
    noun="model",
    default="model",
    signature="{}(input_shape, classes) returns a dpsim.Replica",
    remedy="see docs/own-model.md",
)


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
    return user_code.is_function(token)


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
                allowed="--set label_smoothing with a built-in model",
                remedy="leave label_smoothing out, and smooth the labels in the model",
            )
        module, function, digest = user_code.imported(token, _EXPECTED)
        build = functools.partial(_built, token, module, function, input_shape, classes)
    else:
        from dpsim.nn.models import build_model

        build = functools.partial(build_model, token, input_shape, classes, label_smoothing=label_smoothing)
    return Model(name=token, input_shape=input_shape, classes=classes, source_digest=digest, build=build)


def source_digest(token: str) -> str:
    """``Model.source_digest`` of a token. Imports a user's own model. Raises ``ConfigError`` as ``load``."""
    return user_code.imported(token, _EXPECTED)[2] if is_own(token) else ""


def _built(token: str, module: ModuleType, function: str, input_shape: tuple[int, ...], classes: int) -> Replica:
    with user_code.explained(token, function, _EXPECTED):
        replica = getattr(module, function)(input_shape, classes)
        if missing := [name for name in _MEMBERS if not hasattr(replica, name)]:
            kind = "None" if replica is None else f"an object of type {type(replica).__name__}"
            raise ConfigError(
                f"{function} returned {kind} without {', '.join(missing)}",
                allowed="a dpsim.Replica, such as a dpsim.FunctionReplica",
                remedy=_EXPECTED.remedy,
            )
        layers = tuple(replica.layers)
        if not all(isinstance(layer, LayerSpec) for layer in layers) or not any(layer.tensors for layer in layers):
            raise ConfigError(
                f"the layers of the replica are {layers!r:.200}",
                allowed="a tuple of dpsim.LayerSpec, at least one of them with tensors",
                remedy=_EXPECTED.remedy,
            )
    result: Replica = replica
    return result
