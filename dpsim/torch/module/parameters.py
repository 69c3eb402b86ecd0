"""The trainable parameters of a PyTorch module: which can be trained, and that the runtime alone changes them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dpsim.errors import ConfigError

DTYPES = {torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """A trainable parameter, and where its module keeps it: the parameters of that module, and its name there."""

    name: str
    owner: dict[str, Any]
    leaf: str
    parameter: Any

    @property
    def version(self) -> tuple[int, int]:
        """Another one after the parameter was written by PyTorch, or got other memory."""
        return self.parameter.data_ptr(), self.parameter._version


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedParameters:
    """All trainable parameters of a module, and the names of its state as it was built."""

    module: Any
    parameters: tuple[Trained, ...]
    saved: frozenset[str]

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Raise ``ConfigError`` at the end if a parameter was changed, replaced or frozen in between."""
        before = [each.version for each in self.parameters]
        yield
        for each, version in zip(self.parameters, before, strict=True):
            replaced = each.owner.get(each.leaf) is not each.parameter
            if replaced or each.version != version or not each.parameter.requires_grad:
                raise ConfigError(
                    f"the module {'has replaced' if replaced else 'changes'} its parameter {each.name}",
                    allowed="parameters that the optimizer of the plan alone changes, alike on all ranks",
                    remedy="compute with a changed copy of the parameter, or keep what the module writes in a buffer",
                )

    def check_complete(self) -> None:
        """Raise ``ConfigError`` if the module has other parameters and buffers than when it was built."""
        if added := sorted(self.saved ^ self.module.state_dict().keys()):
            raise ConfigError(
                f"the module makes or removes {', '.join(added)} in its forward pass",
                allowed="a module that is built with all of its parameters and buffers",
                remedy="make them in __init__",
            )


def trained_parameters(module: Any) -> TrainedParameters:
    """Return the trainable parameters of a module. Raises ``ConfigError`` for a module that cannot be trained."""
    _check_tensors(module)
    trained = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)._parameters
            trained.append(Trained(name=name, owner=owner, leaf=leaf, parameter=parameter))
    _check_dtype(trained)
    return TrainedParameters(module=module, parameters=tuple(trained), saved=frozenset(module.state_dict()))


def _check_tensors(module: Any) -> None:
    """Raise ``ConfigError`` for parameters and buffers that have no numbers in memory that can be shared."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise ConfigError(
            "a module that torch.jit has compiled",
            allowed="a module of Python, or of torch.compile",
            remedy="leave torch.jit out",
        )
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        reason = remedy = ""
        if torch.nn.parameter.is_lazy(tensor):
            reason = "has no shape yet: its module is lazy"
            remedy = "call the module once on a sample in the function that builds it"
        elif tensor.layout != torch.strided:
            reason, remedy = f"has the layout {str(tensor.layout).removeprefix('torch.')}", "convert it with to_dense()"
        elif tensor.is_inference():
            reason, remedy = "was made in inference mode", "build the module outside of torch.inference_mode()"
        if reason:
            raise ConfigError(
                f"the module's {name} {reason}", allowed="parameters and buffers of ordinary tensors", remedy=remedy
            )


def _check_dtype(trained: list[Trained]) -> None:
    """Raise ``ConfigError`` unless there are parameters that require a gradient, all float32 or all float64."""
    dtypes = {str(each.parameter.dtype).removeprefix("torch.") for each in trained}
    if len(dtypes) != 1 or not dtypes <= {*DTYPES.values()}:
        raise ConfigError(
            f"parameters of dtype {', '.join(sorted(dtypes))}" if dtypes else "no parameter that requires a gradient",
            allowed="one or more that require a gradient, all of them float32 or all of them float64",
            remedy="convert the module with module.float()" if dtypes else "leave some parameters trainable",
        )
