"""Runs the optimizers' CUDA kernels beside those of the CPU; in numba's simulator it prints what differs, as JSON.

``NUMBA_ENABLE_CUDASIM=1 python simulate_cuda_updates.py``
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from dpsim.kernels import update_cuda
from dpsim.nn.optimizer import update
from dpsim.optimizer import AdamW, Optimizer, Sgd

OPTIMIZERS: tuple[Optimizer, ...] = (
    Sgd(learning_rate=0.1, momentum=0.9),
    Sgd(learning_rate=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    AdamW(learning_rate=0.003),
    AdamW(learning_rate=0.003, weight_decay=0.02),
)
SIZES = (0, 1, 5, 67)


def cases() -> Iterator[tuple[Optimizer, str, int, int]]:
    """The arguments of ``wrong_in``."""
    return itertools.product(OPTIMIZERS, ("float32", "float64"), SIZES, (0, 1))


def wrong_in(optimizer: Optimizer, dtype: str, size: int, shift: int, xp: Any = np) -> str | None:
    """What differs after three steps, if anything, between arrays of ``xp`` and the host's.

    ``shift``: elements by which arrays start off a multiple of 16 bytes.
    """
    random = np.random.default_rng([size, shift])
    names = ("w", "g", *optimizer.slots)
    start = {name: random.standard_normal(size) * 10.0 ** random.integers(-30, 6, size) for name in names}
    results = []
    for kernels in (None, update_cuda.OnStream(0)):
        arrays = {}
        for name, values in start.items():
            host = np.zeros(shift + size, dtype)
            host[shift:] = np.abs(values) if name == "second_moment" else values
            arrays[name] = (host if kernels is None else xp.asarray(host))[shift:]
        state = {slot: arrays[slot] for slot in optimizer.slots}
        for step in range(1, 4):
            given = (arrays["w"], arrays["g"], state, optimizer, 0.07, 1 / 24, step)
            update(*given) if kernels is None else update(*given, kernels)  # type: ignore[arg-type]
        results.append({name: array if kernels is None else array.tobytes() for name, array in arrays.items()})
    for name in names:
        if results[0][name].tobytes() != results[1][name]:
            return f"{name} of {size} elements of {dtype} from {shift}: {optimizer}"
    return None


def main() -> None:
    every = list(cases())
    wrong = [text for case in every if (text := wrong_in(*case)) is not None]
    print(json.dumps({"cases": len(every), "wrong": wrong}))


if __name__ == "__main__":
    main()
