"""What a step of a script begins with: parameters, buffers and optimizer state, read and replaced. Loads torch."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from dpsim.torch.script.probe.reproduce.models import InReplicas, InShards, whole, write


class TrainingState:
    """The state of one model, once there is one, and of the optimizers that were noted."""

    def __init__(self) -> None:
        self.model: InReplicas | InShards | None = None
        self.optimizers: list[Any] = []
        self.names: dict[int, str] = {}
        """Of parameters by their ``id``, as ``parameters`` last found them."""
        self._roots: list[Any] | None = None
        """The modules that are part of no other, as the first step begins."""

    def note(self, optimizer: Any) -> None:
        """Note an optimizer, where it is not noted yet."""
        if not any(each is optimizer for each in self.optimizers):
            self.optimizers.append(optimizer)

    def parameters(self) -> list[tuple[str, Any]]:
        """Return all parameters of the model and of the optimizers, by their names."""
        if self.model is None:
            return []
        found = {id(each): (name, each) for name, each in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    shape = "x".join(map(str, each.shape))
                    name = f"parameter {len(found) + 1} of shape {shape}, outside of {self.model.wrapper}"
                    found.setdefault(id(each), (name, each))
        self.names = {key: name for key, (name, _) in found.items()}
        return list(found.values())

    def buffers(self) -> dict[str, Any]:
        """Return the buffers of the model, by their names."""
        return {} if self.model is None else dict(self.model.module.named_buffers())

    def outside(self) -> dict[str, Any]:
        """Return the tensors of modules that are no part of the model, such as a teacher, by their names."""
        if self._roots is None:
            self._roots = _roots()
        own = {id(each) for _, each in self.parameters()} | {id(each) for each in self.buffers().values()}
        return {
            f"{name} of {type(each).__name__}": tensor
            for each in self._roots
            for name, tensor in (*each.named_parameters(), *each.named_buffers())
            if id(tensor) not in own and type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta
        }

    def local_norms(self) -> tuple[str, ...]:
        """Return the names of the batch norms that take their statistics from each rank's own samples."""
        modules = () if self.model is None else self.model.module.named_modules()
        return tuple(
            name
            for name, module in modules
            if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm) and module.training
        )

    def settings(self, optimizer: Any) -> dict[str, float]:
        """Return the numbers of an optimizer's groups, such as learning rates, by what they are."""
        number = next(n for n, each in enumerate(self.optimizers) if each is optimizer)
        return {
            f"{key} of group {position} of optimizer {number}": float(value)
            for position, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }

    def whole(self) -> dict[str, Any]:
        """Return parameters, buffers and optimizer states as whole tensors. All ranks must ask for it."""
        optimizers = [
            [
                {key: _whole(value) for key, value in optimizer.state.get(each, {}).items()}
                for group in optimizer.param_groups
                for each in group["params"]
            ]
            for optimizer in self.optimizers
        ]
        parameters = {name: whole(each) for name, each in self.parameters()}
        return {"parameters": parameters, "buffers": self.buffers(), "optimizers": optimizers}

    def load(self, saved: dict[str, Any]) -> None:
        """Write what ``whole`` returned into the model and the optimizers."""
        for own, kind in ((dict(self.parameters()), "parameters"), (self.buffers(), "buffers")):
            for name, value in saved[kind].items():
                if name in own and own[name].shape == value.shape:
                    write(own[name], value)
        for optimizer, states in zip(self.optimizers, saved["optimizers"]):
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            for parameter, state in zip(parameters, states):
                own_state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(own_state.get(key), torch.Tensor) and own_state[key].shape == value.shape:
                        write(own_state[key], value)
                    elif key in own_state and not isinstance(value, torch.Tensor):
                        own_state[key] = value


def _roots() -> list[Any]:
    """Return the modules of this process that are part of no other."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in vars(each)]
    parts = {id(child) for each in modules for child in each.children()}
    return [each for each in modules if id(each) not in parts]


def _whole(value: Any) -> Any:
    return whole(value) if isinstance(value, torch.Tensor) else value
