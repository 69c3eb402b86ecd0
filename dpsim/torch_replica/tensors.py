"""Tensors of PyTorch that share the memory of dpsim's arrays, and the stream in which PyTorch computes with them.

An array of the host, of a GPU (CuPy's) and of numba's simulator becomes a tensor in one way, by DLPack.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from dpsim.memory import Array, Memory, aligned_bytes

Tensor = Any
"""A ``torch.Tensor``."""


def tensor_of(array: Array) -> Tensor:
    """The tensor that shares an array's memory."""
    return torch.from_dlpack(array)


def uploaded(memory: Memory, name: str, host: Array) -> Tensor:
    """A copy of a host array as a tensor in a memory, valid until the next of that name.

    On the host it is a copy too, since a module may write to its input. It starts at a multiple of 64 bytes: elsewhere
    libraries may add in another order, and a leaf must have the same bits wherever it begins in a rank's share.
    """
    if memory.deferred:
        return tensor_of(memory.upload(name, host))
    copy = aligned_bytes(host.nbytes).view(host.dtype).reshape(host.shape)
    copy[...] = host
    return tensor_of(copy)


def on_host(tensor: Tensor) -> Array:
    """A copy of a tensor as NumPy's array, with an axis at least. Raises ``TypeError`` for a dtype NumPy lacks."""
    return np.array(tensor.detach().cpu().contiguous().numpy(), ndmin=1)


def computing_in(memory: Memory, device: Any) -> AbstractContextManager[Any]:
    """While it is open, PyTorch's work on a GPU is put into the memory's stream, as all other work there."""
    if device.type == "cpu":  # the host, and numba's simulator
        return contextlib.nullcontext()
    memory.use()
    stream = torch.cuda.ExternalStream(memory.stream.cupy.ptr, device=device)
    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context
