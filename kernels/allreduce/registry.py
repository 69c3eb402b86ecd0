"""The versions of the allreduce. Each kernel file registers its own; docs, tests and benchmark take them from here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dpsim.kernels.allreduce.tree import PartialSums

KernelBackend = Literal["numpy", "cpu", "cuda"]

_MODULES = ("reference", "cpu", "cuda.versions")
"""Where versions register themselves. None of these loads numba or CUDA when it is imported."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """One allreduce kernel of one node.

    ``bytes_moved(sums, size_bytes)`` counts what all ranks together read and write of gradients, where each partial sum
    has ``size_bytes``, with no reuse by caches; ``synchronisations(sums)`` how often a rank waits for others, one after
    another. ``variants`` are what it fuses: ``scale`` (by a number, after the sum), ``compression`` (16 bits between
    ranks, float32 sums). ``most_bytes``: the largest array it takes; None: any.
    ``make`` prepares it; its form belongs to the backend (see ``cpu`` and ``cuda.launch``).
    """

    name: str
    backend: KernelBackend
    summary: str
    bytes_moved: Callable[[PartialSums, int], float]
    synchronisations: Callable[[PartialSums], int]
    make: Callable[..., Any]
    dtypes: tuple[str, ...] = ("float32", "float64")
    variants: tuple[str, ...] = ()
    most_bytes: int | None = None


_VERSIONS: dict[tuple[str, str], Version] = {}


def register(version: Version) -> Version:
    """Add a version; its name is its own within its backend."""
    key = (version.backend, version.name)
    if key in _VERSIONS:
        raise ValueError(f"version {version.name!r} of backend {version.backend!r} is registered twice")
    _VERSIONS[key] = version
    return version


def versions(backend: KernelBackend | None = None) -> list[Version]:
    """Return all versions, or a backend's, in the order of the ladder: from the reference to the fastest."""
    for module in _MODULES:
        importlib.import_module(f"dpsim.kernels.allreduce.{module}")
    matching = (version for version in _VERSIONS.values() if backend in (None, version.backend))
    return sorted(matching, key=lambda version: get_args(KernelBackend).index(version.backend))


def find(backend: KernelBackend, name: str) -> Version:
    """Return the version of a name, which must be one of the backend's."""
    return next(version for version in versions(backend) if version.name == name)


def floor_bytes(ranks: int, size_bytes: int) -> int:
    """Return the bound of every allreduce in one memory: each rank's array read once and written once."""
    return 2 * ranks * size_bytes
