"""Trains the module that a user's function gives with DDP, as an ordinary script would. Loads torch."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from dpsim.errors import ConfigError, is_missing

MOMENTUM = 0.9


def train(function: str, local_batch: int | None) -> None:
    """Train the module that ``package.module:function`` gives on its one batch, until something ends this.

    The function gives ``(module, batch)`` or ``(module, batch, loss)``. The batch is what the module is called with: a
    tensor, a tuple of arguments or a dictionary of keyword arguments. ``loss`` makes a number of the module's output;
    without it that is the output's own ``loss`` or the mean of its first tensor. The optimizer is SGD with momentum, at
    a learning rate of 0, so that the training can go on for ever. Raises ``ConfigError``.
    """
    module, batch, loss = _built(function, _call(function, local_batch))
    distributed.init_process_group()
    ddp = DistributedDataParallel(module.train())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0, momentum=MOMENTUM)
    for _ in itertools.count():
        optimizer.zero_grad()
        value = loss(_called(ddp, batch))
        if not (isinstance(value, torch.Tensor) and value.dim() == 0 and value.requires_grad):
            raise ConfigError(
                f"the loss of {function} is {type(value).__name__}"
                + (f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""),
                allowed="a tensor without dimensions that depends on the parameters",
                remedy="return a third value: a function that makes one number of the module's output",
            )
        value.backward()
        optimizer.step()


def _call(function: str, local_batch: int | None) -> Any:
    """What the user's function returns. Raises ``ConfigError`` if there is no such function."""
    module_name, _, name = function.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if not is_missing(module_name, error):
            raise
        raise ConfigError(
            f"there is no module {error.name!r}",
            allowed="a module that Python can import here",
            remedy="start dpsim in the folder that has it, or install the package",
        ) from error
    if not callable(build):
        raise ConfigError(f"{module_name} has no function {name!r}", allowed="the name of a function in that module")
    arguments = () if local_batch is None else (local_batch,)
    try:
        inspect.signature(build).bind(*arguments)
    except TypeError as error:
        given = f"--torch {function} " + ("without --local-batch" if local_batch is None else "with --local-batch")
        raise ConfigError(
            f"{given}: {error}",
            allowed="a function without arguments, or one that gets the local batch",
            remedy=f"define it as def {name}(local_batch=8), for use with and without --local-batch",
        ) from error
    return build(*arguments)


def _built(function: str, built: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
    """The module, the batch and the loss that a function gave. Raises ``ConfigError``."""
    if isinstance(built, tuple) and len(built) in (2, 3) and isinstance(built[0], torch.nn.Module):
        module, batch, *loss = built
        if not loss or callable(loss[0]):
            return module, batch, loss[0] if loss else _default_loss
    kinds = ", ".join(type(each).__name__ for each in built) if isinstance(built, tuple) else type(built).__name__
    raise ConfigError(
        f"{function} returned {kinds}",
        allowed="(module, batch) or (module, batch, loss): a torch.nn.Module, what it is called with, a function",
    )


def _called(ddp: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return ddp(**batch)
    return ddp(*batch) if isinstance(batch, (tuple, list)) else ddp(batch)


def _default_loss(output: Any) -> Any:
    """The output's own loss, or the mean of its first tensor of floating-point numbers; the output itself without."""
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        return output.loss
    leaves = torch.utils._pytree.tree_leaves(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return tensors[0].float().mean() if tensors else output
