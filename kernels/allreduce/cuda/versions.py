"""The versions for NVIDIA GPUs, registered. Importing this loads no CUDA; ``launch`` describes how they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dpsim.kernels.allreduce.algorithms import IN_TREE_ORDER, Algorithm
from dpsim.kernels.allreduce.cuda.launch import Launch
from dpsim.kernels.allreduce.cuda.moves import moved, schedule
from dpsim.kernels.allreduce.registry import Version, register
from dpsim.kernels.allreduce.tree import PartialSums

ONE_SHOT_BYTES = 16 << 20
"""The largest array of one-shot. Every rank reads all arrays, in pieces of 512 KiB between which all ranks wait."""


def _make(name: str) -> Callable[..., Launch]:
    def make(arrays: Sequence[Any], sums: PartialSums, **options: Any) -> Launch:
        from dpsim.kernels.allreduce.cuda import prepare  # loads CUDA

        return prepare.make(name, arrays, sums, **options)

    return make


def _scheduled(
    algorithm: Algorithm,
) -> tuple[Callable[[PartialSums, int], float], Callable[[PartialSums], int]]:
    """Return what the moves of an algorithm move, and how often a rank waits between them."""
    return (
        lambda sums, size: float(moved(schedule(algorithm, sums)) * size),
        lambda sums: len(schedule(algorithm, sums)) + 1,
    )


for _name, _summary, (_bytes_moved, _synchronisations) in (
    (
        "ring",
        "each chunk goes around twice; partial sums stay where they are",
        _scheduled(IN_TREE_ORDER["ring"]),
    ),
    (
        "halving-doubling",
        "up the tree, each rank over its share, and back",
        _scheduled(IN_TREE_ORDER["halving-doubling"]),
    ),
    (
        "one-shot",
        "every rank adds everything, in registers until all have read",
        (lambda sums, size: sums.ranks * (len(sums.owners) + 1) * size, lambda sums: 2),
    ),
    (
        "two-shot",
        "each rank adds its share of the elements, writes it to every rank",
        (lambda sums, size: (len(sums.owners) + sums.ranks) * size, lambda sums: 2),
    ),
):
    register(
        Version(
            name=_name,
            backend="cuda",
            summary=_summary,
            bytes_moved=_bytes_moved,
            synchronisations=_synchronisations,
            make=_make(_name),
            dtypes=("float16", "bfloat16", "float32", "float64"),
            variants=("scale", "compression") if _name == "two-shot" else ("scale",),
            most_bytes=ONE_SHOT_BYTES if _name == "one-shot" else None,
        )
    )
