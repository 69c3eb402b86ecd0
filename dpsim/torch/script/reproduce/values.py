"""Values of a script that are compared: samples of tensors, hashes of rows, states of random numbers. Loads torch."""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from typing import Any

import numpy as np
import torch

from dpsim.torch.script.reproduce.models import hashed, whole
from dpsim.torch.script.reproduce.observation import MOST_VALUES

Array = Any
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


def sampled(tensor: Any) -> Array:
    """Return at most ``MOST_VALUES`` values of a whole tensor, at equal distances, as an array of one dimension."""
    flat = whole(tensor).reshape(-1)
    stride = -(-flat.numel() // MOST_VALUES) or 1
    values = flat[::stride]
    return (values.double() if values.dtype == torch.float64 else values.float()).numpy().copy()


def row_hashes(inputs: Any, samples: int) -> tuple[int, ...]:
    """Return a hash for each sample: of its rows in all tensors of the inputs that have one for each."""
    leaves = torch.utils._pytree.tree_leaves(inputs)
    tensors = [each for each in leaves if isinstance(each, torch.Tensor) and each.dim() and len(each) == samples]
    rows = [
        each.detach().contiguous().view(torch.uint8).reshape(samples, -1).numpy() if each.numel() else None
        for each in (each if each.dim() > 1 else each.unsqueeze(1) for each in tensors)
    ]
    return tuple(hashed(b"".join(row[n].tobytes() for row in rows if row is not None)) for n in range(samples))


def random_state() -> bytes:
    """Return a hash of the states of all random numbers of this process."""
    numbers = np.random.get_state()
    parts = (torch.get_rng_state().numpy().tobytes(), str((numbers[1].tobytes(), numbers[2], random.getstate())))  # type: ignore[index]
    return hashlib.blake2b(parts[0] + parts[1].encode(), digest_size=8).digest()


def seed_untouched(rank: int) -> None:
    """Seed what Python and NumPy seed differently in every process, so that a run can be repeated."""
    random.seed(rank)
    np.random.seed(rank)
    make, made = np.random.default_rng, itertools.count()

    @functools.wraps(make)
    def default_rng(seed: Any = None) -> Any:
        return make([rank, next(made)] if seed is None else seed)

    np.random.default_rng = default_rng
