"""The state of a PyTorch module that is not trained: persistent buffers and frozen parameters, in dpsim's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dpsim.errors import ConfigError
from dpsim.memory import Array, Memory
from dpsim.torch_replica.tensors import on_host, tensor_of

_ALIGNMENT_BYTES = 256


def place(module: Any, memory: Memory) -> dict[str, Array]:
    """Move what is not trained into a memory, and return the arrays that the module's state shares with it, by name.

    State is what ``module.state_dict()`` has besides trainable parameters. A buffer that is not in it is moved to the
    memory's device and is no state. Raises ``ConfigError`` for a dtype that NumPy does not have.
    """
    named = _named(module)
    kept = {name: tensor for name, tensor in named.items() if name in module.state_dict()}
    values = {id(tensor): _value(name, tensor) for name, tensor in kept.items()}
    sizes = [-(-value.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for value in values.values()]
    block = memory.zeros(max(sum(sizes), 1))
    device = tensor_of(block).device
    starts = np.cumsum([0, *sizes]).tolist()
    arrays: dict[int, Array] = {}
    for start, (key, value) in zip(starts, values.items(), strict=False):
        arrays[key] = block[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
        memory.write(arrays[key], value)
    state: dict[str, Array] = {}
    for name, tensor in named.items():
        array = arrays.get(id(tensor))
        if array is None:
            _set(module, name, tensor.to(device))
            continue
        if not any(array is other for other in state.values()):
            state[name] = array
        _set(module, name, tensor_of(array).reshape(tensor.shape))
    return state


def check_place(module: Any, state: Mapping[str, Array], memory: Memory) -> None:
    """Raise ``ConfigError`` if a step has put other tensors in place of the state."""
    named = _named(module)
    for name, array in state.items():
        if array.size and named[name].data_ptr() != memory.address(array):
            raise ConfigError(
                f"the module has replaced its buffer {name}",
                allowed="a buffer that is written in place, where checkpoints read it",
                remedy=f"write to it with copy_: self.{name.rpartition('.')[2]}.copy_(value)",
            )


@contextlib.contextmanager
def unchanged(state: Mapping[str, Array]) -> Iterator[None]:
    """At the end the state is what it was."""
    before = {name: array.copy() for name, array in state.items()}
    try:
        yield
    finally:
        for name, array in state.items():
            array[...] = before[name]


def _named(module: Any) -> dict[str, Any]:
    """Buffers and frozen parameters by name, those that modules share by each of their names."""
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


def _set(module: Any, name: str, value: Any) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._buffers:
        owner._buffers[leaf] = value
    else:
        owner._parameters[leaf].data = value
