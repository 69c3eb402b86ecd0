"""The versions for NVIDIA GPUs, registered. Importing this loads no CUDA; ``launch`` describes how they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dpsim.kernels.allreduce.algorithms import ring
from dpsim.kernels.allreduce.cuda.launch import Launch
from dpsim.kernels.allreduce.cuda.moves import moved, schedule
from dpsim.kernels.allreduce.halving_doubling import halving_doubling
from dpsim.kernels.allreduce.registry import Version, register
from dpsim.kernels.allreduce.tree import PartialSums


def _make(name: str) -> Callable[..., Launch]:
    def make(arrays: Sequence[Any], sums: PartialSums, **options: Any) -> Launch:
        from dpsim.kernels.allreduce.cuda import prepare  # loads CUDA

        return prepare.make(name, arrays, sums, **options)

    return make


ONE_SHOT_BYTES = 16 << 20
"""The largest array of one-shot. Every rank reads all arrays, in pieces of 512 KiB between which all ranks wait."""

DTYPES = ("float16", "bfloat16", "float32", "float64")

register(
    Version(
        name="ring",
        backend="cuda",
        summary="each chunk goes around twice; partial sums stay where they are",
        bytes_moved=lambda sums, size: float(moved(schedule(ring, sums)) * size),
        synchronisations=lambda sums: len(schedule(ring, sums)) + 1,
        make=_make("ring"),
        dtypes=DTYPES,
        variants=("scale",),
    )
)
register(
    Version(
        name="halving-doubling",
        backend="cuda",
        summary="up the tree, each rank over its share, and back",
        bytes_moved=lambda sums, size: float(moved(schedule(halving_doubling, sums)) * size),
        synchronisations=lambda sums: len(schedule(halving_doubling, sums)) + 1,
        make=_make("halving-doubling"),
        dtypes=DTYPES,
        variants=("scale",),
    )
)
register(
    Version(
        name="one-shot",
        backend="cuda",
        summary="every rank adds everything, in registers until all have read",
        bytes_moved=lambda sums, size: sums.ranks * (len(sums.owners) + 1) * size,
        synchronisations=lambda sums: 2,
        make=_make("one-shot"),
        dtypes=DTYPES,
        variants=("scale",),
        most_bytes=ONE_SHOT_BYTES,
    )
)
register(
    Version(
        name="two-shot",
        backend="cuda",
        summary="each rank adds its share of the elements, writes it to every rank",
        bytes_moved=lambda sums, size: (len(sums.owners) + sums.ranks) * size,
        synchronisations=lambda sums: 2,
        make=_make("two-shot"),
        dtypes=DTYPES,
        variants=("scale", "compression", "sgd"),
    )
)
