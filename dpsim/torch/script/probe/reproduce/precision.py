"""Computing in 16 bits: what of it a script uses, and how it trains in float32, or without its scaler. Loads torch.

Autocast and the policy of ``fully_shard`` get float32 in place of their 16-bit types, so that whatever they cast is
still cast. Parameters that the script itself makes 16 bits wide stay so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from dpsim.torch.script.probe.process_group import replace_everywhere
from dpsim.torch.script.probe.rank_record import type_name

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_TYPES = ("param_dtype", "reduce_dtype", "output_dtype")


class Precision:
    """The 16-bit types of a rank's script, and its scaler of gradients."""

    def __init__(self, run: Any, rank: int) -> None:
        self._run = run
        self._overflows = bool(run.overflow) and rank == run.devices - 1
        self.used: dict[str, None] = {}
        """What computes in 16 bits."""
        self.sent_as = ""
        """The 16-bit type that the policy names for reductions."""
        self.scales = False
        """Whether a scaler scales the losses."""
        self._scale = 1.0
        self.stepped: Callable[[], None] = lambda: None
        """Called as a scaler has let an optimizer step, or not."""
        self._begun: dict[str, tuple[Any, Any]] = {}

    def install(self, wrap: Callable[[Any, str, Callable[..., Any]], None]) -> None:
        """Put itself around autocast, scalers of gradients and ``fully_shard``."""
        wrap(torch.autocast, "__enter__", self._autocast)
        wrap(torch.amp.GradScaler, "__init__", self._scaler)
        wrap(torch.amp.GradScaler, "scale", self._scaled)
        wrap(torch.amp.GradScaler, "step", self._step)
        shard = fsdp.fully_shard

        @functools.wraps(shard)
        def sharded(*arguments: Any, **keywords: Any) -> Any:
            if keywords.get("mp_policy") is not None:
                keywords["mp_policy"] = self._policy(keywords["mp_policy"])
            return shard(*arguments, **keywords)

        replace_everywhere(shard, sharded)

    def _autocast(self, original: Any, autocast: Any) -> Any:
        entered = original(autocast)
        dtype = torch.get_autocast_dtype(autocast.device)
        if torch.is_autocast_enabled(autocast.device) and dtype in _SIXTEEN_BITS:
            self.used.setdefault(f"autocast to {type_name(dtype)}")
            if self._run.in_float32:
                torch.set_autocast_dtype(autocast.device, torch.float32)
        return entered

    def _policy(self, policy: Any) -> Any:
        types = {name: getattr(policy, name) for name in _TYPES}
        narrow = {name: dtype for name, dtype in types.items() if dtype in _SIXTEEN_BITS}
        if not narrow:
            return policy
        self.used.setdefault("MixedPrecisionPolicy with " + ", ".join(f"{n} {type_name(t)}" for n, t in narrow.items()))
        if self._run.in_float32:
            return dataclasses.replace(policy, **dict.fromkeys(narrow, torch.float32))
        self.sent_as = type_name(narrow["reduce_dtype"]) if "reduce_dtype" in narrow else ""
        return policy

    def _scaler(self, original: Any, scaler: Any, /, *arguments: Any, **keywords: Any) -> None:
        original(scaler, *arguments, **keywords)
        self.scales |= scaler._enabled
        if self._run.without_scaler:
            scaler._enabled = False

    def _scaled(self, original: Any, scaler: Any, /, *arguments: Any, **keywords: Any) -> Any:
        result = original(scaler, *arguments, **keywords)
        self._scale = float(scaler.get_scale())
        return result

    def _step(self, original: Any, scaler: Any, /, *arguments: Any, **keywords: Any) -> Any:
        result = original(scaler, *arguments, **keywords)
        self.stepped()
        return result

    def scale(self) -> float:
        """Return the number by which the loss was scaled that is now behind its backward."""
        scale, self._scale = self._scale, 1.0
        return scale

    def overflowing(self, tensors: Any) -> Any:
        """Return what backward begins at, on a rank that is to overflow times infinity."""
        if not self._overflows:
            return tensors
        several = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        return tuple(each * math.inf for each in several)

    def update_begins(self, optimizer: Any, name: str, parameter: Any, learning_rate: Any) -> None:
        """Keep a parameter of 16 bits as it is before an optimizer of PyTorch updates it."""
        if parameter.dtype in _SIXTEEN_BITS and learning_rate and type(optimizer).__module__.startswith("torch.optim"):
            self._begun[name] = parameter, _own(parameter).clone()

    def lost(self) -> dict[str, float]:
        """Return the parts of each such parameter that have a gradient, and that the update has left as they were."""
        lost = {}
        for name, (parameter, before) in self._begun.items():
            if parameter.grad is not None:
                given = _own(parameter.grad) != 0
                left = given & (_own(parameter) == before)
                lost[name] = float(left.sum()) / max(float(given.sum()), 1.0)
        self._begun = {}
        return lost


def unscaled(optimizer: Any, gradient: Any) -> Any:
    """Return a gradient as an optimizer uses it: one that is fused divides by a scaler's number itself."""
    scale = getattr(optimizer, "grad_scale", None)
    return gradient if scale is None else gradient / scale


def skips(optimizer: Any) -> bool:
    """Return whether an optimizer that is fused leaves its parameters alone, for gradients overflow."""
    return bool(getattr(optimizer, "found_inf", None))


def narrow(module: Any) -> dict[str, str]:
    """Return the types of the parameters and buffers of a model that have 16 bits, by their names."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: type_name(each.dtype) for name, each in tensors if each.dtype in _SIXTEEN_BITS}


def in_norms(module: Any, names: Any) -> tuple[str, ...]:
    """Return those of the names of parameters and buffers that are of layers that normalise."""
    norms = [name for name, each in module.named_modules() if "norm" in type(each).__name__.lower()]
    return tuple(name for name in names if name.rpartition(".")[0] in norms)


def _own(tensor: Any) -> Any:
    """The values of a tensor, or those of this rank's shard of it."""
    values = tensor.detach()
    return values.to_local() if isinstance(values, DTensor) else values
