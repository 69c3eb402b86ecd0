"""Initial values of parameters, a function of the tensor and the seed alone."""

from __future__ import annotations

import math

import numpy as np

from dpsim import rng
from dpsim.replica import Array
from dpsim.workload import Tensor


def he_normal(tensor: Tensor, seed: int, *, fan_in: int) -> Array:
    """Normal numbers of variance 2 / fan_in (He et al., arXiv:1502.01852), from the stream named after the tensor."""
    values = rng.normal(tensor.name, seed, tensor.shape, dtype=tensor.dtype)
    values *= math.sqrt(2.0 / fan_in)
    return values


def zeros(tensor: Tensor) -> Array:
    return np.zeros(tensor.shape, tensor.dtype)


def ones(tensor: Tensor) -> Array:
    return np.ones(tensor.shape, tensor.dtype)
