"""The model that a token names: a built-in one, or one of the user's own from a Python file."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from dpsim.errors import ConfigError
from dpsim.nn import build_model
from dpsim.replica import Replica

_FUNCTION = "model"
_MEMBERS = ("layers", "initial_parameters", "bind", "state", "forward_backward", "evaluate")


def build_replica(token: str, input_shape: tuple[int, ...], classes: int) -> Replica:
    """The replica of ``cnn:16,32`` and the like (``dpsim.nn.build_model``), or of a file ``own.py``.

    ``own.py`` calls the file's function ``model(input_shape, classes)``, ``own.py:other`` its function ``other``; it
    returns a ``dpsim.Replica``, the same on every rank. The file runs with ``__name__`` other than ``"__main__"``.
    Raises ``ConfigError`` for a file that cannot be used, with the place of an exception in it.
    """
    file, _, function = token.partition(":")
    if not file.endswith(".py"):
        return build_model(token, input_shape, classes)
    replica = _called(file, function or _FUNCTION, input_shape, classes)
    missing = [name for name in _MEMBERS if not hasattr(replica, name)]
    if missing:
        raise ConfigError(
            f"{function or _FUNCTION} of {file} returned a {type(replica).__name__} without {', '.join(missing)}",
            allowed="a dpsim.Replica, such as a dpsim.FunctionReplica",
            remedy="see docs/own-model.md",
        )
    found: Replica = replica
    return found


def _called(file: str, function: str, input_shape: tuple[int, ...], classes: int) -> Any:
    if not Path(file).is_file():
        raise ConfigError(f"model {file!r}: there is no such file", allowed="the path of a Python file")
    try:
        names = runpy.run_path(file, run_name="dpsim_model")
        if callable(names.get(function)):
            return names[function](input_shape, classes)
    except Exception as error:
        lines, trace = [], error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == file:
                lines.append(trace.tb_lineno)
            trace = trace.tb_next
        where = f", line {lines[-1]}" if lines else ""
        raise ConfigError(
            f"model {file}{where}: {type(error).__name__}: {error}",
            allowed=f"a Python file whose function {function}(input_shape, classes) returns a dpsim.Replica",
        ) from error
    raise ConfigError(
        f"model {file} has no function {function!r}",
        allowed=f"def {function}(input_shape, classes), which returns a dpsim.Replica",
        remedy=f"write it, or name another one with {file}:FUNCTION",
    )
