"""The memory that dpsim and a PyTorch module share: tensors of dpsim's arrays, and the module's untrained state.

An array of the host, of a GPU (CuPy's) and of numba's simulator becomes a tensor in one way, by DLPack. State that is
not trained are persistent buffers and frozen parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpsim.errors import ConfigError
from dpsim.memory import Array, Memory, aligned_bytes

_ALIGNMENT_BYTES = 256
Tensor = Any
"""A ``torch.Tensor``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleState:
    """``arrays`` by name, and the buffers that share them: (name, the buffers of its module, name there, tensor)."""

    arrays: dict[str, Array]
    buffers: tuple[tuple[str, Mapping[str, Any], str, Any], ...]

    def check(self) -> None:
        """Raise ``ConfigError`` if the module has put other tensors in place of its buffers."""
        for name, buffers, leaf, tensor in self.buffers:
            if buffers.get(leaf) is not tensor:
                raise ConfigError(
                    f"the module has replaced its buffer {name}",
                    allowed="a buffer that is written in place, where checkpoints read it",
                    remedy=f"write to it with copy_: self.{leaf}.copy_(value)",
                )


def move_state(module: Any, memory: Memory) -> ModuleState:
    """Move what is not trained into a memory, where the module and the returned arrays share it.

    State is what ``module.state_dict()`` has besides trainable parameters. A buffer that is not in it is moved to the
    memory's device and is no state. Raises ``ConfigError`` for a dtype that NumPy does not have.
    """
    named, saved = _named(module), module.state_dict()
    values = {id(tensor): _value(name, tensor) for name, tensor in named.items() if name in saved}
    sizes = [-(-value.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for value in values.values()]
    starts = np.cumsum([0, *sizes]).tolist()
    block = memory.zeros(max(starts[-1], 1))
    shared: dict[int, Array] = {}
    for start, (key, value) in zip(starts, values.items(), strict=False):
        shared[key] = block[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
        memory.write(shared[key], value)
    device = tensor_of(block).device
    arrays: dict[str, Array] = {}
    buffers = []
    for name, tensor in named.items():
        array = shared.get(id(tensor))
        placed = tensor.to(device) if array is None else tensor_of(array).reshape(tensor.shape)
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        if leaf in owner._buffers:
            owner._buffers[leaf] = placed
        else:
            owner._parameters[leaf].data = placed
        if array is not None and not any(array is other for other in arrays.values()):
            arrays[name] = array
            if leaf in owner._buffers:
                buffers.append((name, owner._buffers, leaf, placed))
    return ModuleState(arrays=arrays, buffers=tuple(buffers))


@contextlib.contextmanager
def unchanged(state: Mapping[str, Array]) -> Iterator[None]:
    """Restore the state at the end."""
    before = {name: array.copy() for name, array in state.items()}
    try:
        yield
    finally:
        for name, array in state.items():
            array[...] = before[name]


def _named(module: Any) -> dict[str, Any]:
    """Return buffers and frozen parameters by name, those that modules share by each of their names."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    parameters = module.named_parameters(remove_duplicate=False)
    return buffers | {name: parameter for name, parameter in parameters if not parameter.requires_grad}


def _value(name: str, tensor: Any) -> Array:
    try:
        return on_host(tensor)
    except TypeError as error:
        raise ConfigError(
            f"the module's {name} is of dtype {str(tensor.dtype).removeprefix('torch.')}",
            allowed="state of a dtype that NumPy has",
            remedy="convert it with float()",
        ) from error


def tensor_of(array: Array) -> Tensor:
    """Return the tensor that shares an array's memory."""
    return torch.from_dlpack(array)


def uploaded(memory: Memory, name: str, host: Array) -> Tensor:
    """Return a copy of a host array as a tensor in a memory, valid until the next of that name.

    On the host it is a copy too, since a module may write to its input. It starts at a multiple of 64 bytes: elsewhere
    libraries may add in another order, and a leaf must have the same bits wherever it begins in a rank's share.
    """
    if memory.deferred:
        return tensor_of(memory.upload(name, host))
    copy = aligned_bytes(host.nbytes).view(host.dtype).reshape(host.shape)
    copy[...] = host
    return tensor_of(copy)


def on_host(tensor: Tensor) -> Array:
    """Copy a tensor to a NumPy array with one axis or more. Raises ``TypeError`` for a dtype that NumPy lacks."""
    return np.array(tensor.detach().cpu().contiguous().numpy(), ndmin=1)


def computing_in(memory: Memory, device: Any) -> AbstractContextManager[Any]:
    """Put PyTorch's work on a GPU into the memory's stream meanwhile, as all other work there."""
    if device.type == "cpu":  # the host, and numba's simulator
        return contextlib.nullcontext()
    memory.use()
    stream = torch.cuda.ExternalStream(memory.stream.cupy.ptr, device=device)
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context
