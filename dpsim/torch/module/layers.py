"""The layers of a PyTorch module, in the order in which a traced step makes their gradients final."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dpsim.errors import ConfigError
from dpsim.grouping import grouped
from dpsim.replica import LayerSpec
from dpsim.torch.module.parameters import DTYPES
from dpsim.workload import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleLayer:
    """A module with parameters of its own: ``parameters`` in the order of ``spec.tensors``."""

    spec: LayerSpec
    module: Any
    parameters: tuple[Any, ...]


def layers_of(module: Any, train: Callable[[], None]) -> tuple[ModuleLayer, ...]:
    """Return the layers in forward order: the reverse of the order in which ``train``, a forward and a backward pass,
    gives them their gradients. Those with a parameter that gets none come first.

    A layer is a module with its own trainable parameters; a shared parameter belongs to the first module that has it.
    Raises ``ConfigError`` if a parameter gets its gradient in several parts.
    """
    arrived: list[int] = []
    trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda each: arrived.append(id(each)))
        for _, parameter in trainable
    ]
    try:
        train()
    finally:
        for hook in hooks:
            hook.remove()
    for name, parameter in trainable:
        parameter.grad = None
        if arrived.count(id(parameter)) > 1:
            raise gradient_in_parts(name)
    own = grouped(trainable, lambda named: named[0].rpartition(".")[0])
    position = {key: number for number, key in enumerate(arrived)}
    last = {path: max(position.get(id(p), len(position)) for _, p in named) for path, named in own.items()}
    order = sorted(own, key=lambda path: -last[path])
    return tuple(_layer(module, path, own[path]) for path in order)


def _layer(module: Any, path: str, named: list[tuple[str, Any]]) -> ModuleLayer:
    part = module.get_submodule(path)
    tensors = tuple(Tensor(name=name, shape=tuple(p.shape), dtype=DTYPES[p.dtype]) for name, p in named)
    normalises = isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
    spec = LayerSpec(
        name=path or "module",
        kind=type(part).__name__,
        tensors=tensors,
        batch_norm_channels=part.num_features if normalises else 0,
    )
    return ModuleLayer(spec=spec, module=part, parameters=tuple(parameter for _, parameter in named))


def gradient_in_parts(name: str) -> ConfigError:
    """Return the error for a parameter whose gradient changes after it was announced."""
    return ConfigError(
        f"the parameter {name} gets its gradient in several parts of a backward pass",
        allowed="gradients that are final when autograd has added them up once",
        remedy="checkpoint activations with use_reentrant=False",
    )
