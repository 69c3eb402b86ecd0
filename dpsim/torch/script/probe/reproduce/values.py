"""Values of a script that are compared: samples of tensors, hashes of rows, states of random numbers. Loads torch."""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import sys
from typing import Any

import torch

from dpsim.torch.script.probe.around import records_gradients
from dpsim.torch.script.probe.reproduce.models import content, hashed, whole
from dpsim.torch.script.probe.reproduce.report import MOST_VALUES

_NORMAL = torch.Tensor.normal_


def rounded(output: Any, noise_of: Any) -> Any:
    """Return a module's output with what a rounding of its sums would add, at random; None: leave it."""
    if not (isinstance(output, torch.Tensor) and output.is_floating_point()):
        return None
    size = output.detach().float().square().mean().sqrt()
    if not torch.isfinite(size):
        return None
    noise = torch.empty(output.shape)
    _NORMAL(noise, generator=noise_of)
    return output + (noise * (size * torch.finfo(output.dtype).eps)).to(output.dtype)


def mean_of(tensors: Any) -> float:
    """Return the sum of the means of what backward begins at."""
    several = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    return sum(float(each.detach().float().mean()) for each in several)


def sampled(tensor: Any) -> tuple[str, bytes]:
    """Return at most ``MOST_VALUES`` values of a whole tensor, at equal distances: their format, and their bytes."""
    flat = whole(tensor).reshape(-1)
    stride = -(-flat.numel() // MOST_VALUES) or 1
    values = flat[::stride]
    return ("f8", content(values)) if values.dtype == torch.float64 else ("f4", content(values.float()))


def has_gradient(*values: Any) -> bool:
    """Return whether backward would pass through any of these values."""
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    return records_gradients() and any(each.grad_fn is not None for each in tensors)


def row_hashes(inputs: Any, samples: int) -> tuple[int, ...]:
    """Return a hash for each sample: of its rows in all tensors of the inputs that have one for each."""
    leaves = torch.utils._pytree.tree_leaves(inputs)
    tensors = [each for each in leaves if isinstance(each, torch.Tensor) and each.dim() and len(each) == samples]
    rows = [(content(each), each.numel() * each.element_size() // samples) for each in tensors]
    return tuple(hashed(b"".join(all_[n * size : (n + 1) * size] for all_, size in rows)) for n in range(samples))


def random_state() -> bytes:
    """Return a hash of the states of all random numbers of this process: PyTorch's, Python's, NumPy's if it has one."""
    state = hashlib.blake2b(content(torch.get_rng_state()), digest_size=8)
    state.update(str(random.getstate()).encode())
    if numpy := numpy_random():
        _, numbers, position, *_ = numpy.get_state()
        state.update(numbers.tobytes() + str(position).encode())
    return state.digest()


def numpy_random() -> Any:
    """Return ``numpy.random`` where something has loaded NumPy, as PyTorch does if it is there; else nothing."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def seed_untouched(rank: int) -> None:
    """Seed what Python and NumPy seed differently in every process, so that a run can be repeated."""
    random.seed(rank)
    numpy = numpy_random()
    if numpy is None:
        return
    numpy.seed(rank)
    make, made = numpy.default_rng, itertools.count()

    @functools.wraps(make)
    def default_rng(seed: Any = None) -> Any:
        return make([rank, next(made)] if seed is None else seed)

    numpy.default_rng = default_rng
