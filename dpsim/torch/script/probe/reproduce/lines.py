"""The lines of a script that make its modules and samplers, to be named beside what goes wrong. Loads torch."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.data import Sampler

from dpsim.torch.script.probe.script_error import is_own, short_path

_MODULES: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_SAMPLER = "dpsim_line"


def script_line() -> str:
    """Return the innermost line of the user's own files that this is called from: ``train.py:17``; empty without."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def install() -> None:
    """Note the line of each module with tensors, and of each sampler, that this process makes from now on."""

    def made(module: Any, *_: Any) -> None:
        if module not in _MODULES:
            _MODULES[module] = script_line()

    def new(kind: Any, *_: Any, **__: Any) -> Any:
        sampler = object.__new__(kind)
        object.__setattr__(sampler, _SAMPLER, script_line())
        return sampler

    register_module_parameter_registration_hook(made)
    register_module_buffer_registration_hook(made)
    Sampler.__new__ = new


def module_lines(model: nn.Module) -> dict[str, str]:
    """Return the lines that made the modules of a model with parameters or buffers of their own, by their names."""
    return {
        name: line
        for name, module in model.named_modules()
        if (line := _MODULES.get(module, "")) and (module._parameters or module._buffers)
    }


def sampler_line(sampler: Any) -> str:
    """Return the line that made a sampler; empty if that is not known."""
    return str(getattr(sampler, _SAMPLER, ""))
