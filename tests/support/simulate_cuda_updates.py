"""Runs the optimizers' CUDA kernels in numba's simulator beside those of the CPU; prints what differs, as JSON.

``NUMBA_ENABLE_CUDASIM=1 python simulate_cuda_updates.py``
"""

from __future__ import annotations

import itertools
import json

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


def wrong_in(optimizer: Optimizer, dtype: str, size: int, shift: int) -> str | None:
    """What differs after three steps, if anything. ``shift``: elements by which arrays start off a 16-byte boundary."""
    random = np.random.default_rng([size, shift])
    names = ("w", "g", *optimizer.slots)
    start = {name: random.standard_normal(size) * 10.0 ** random.integers(-30, 6, size) for name in names}
    results = []
    for kernels in (None, update_cuda.OnStream(0)):
        arrays = {}
        for name, values in start.items():
            memory = np.zeros(size + 8, dtype)
            first = -memory.ctypes.data % 16 // memory.itemsize + shift
            arrays[name] = memory[first : first + size]
            arrays[name][:] = np.abs(values) if name == "second_moment" else values
        state = {slot: arrays[slot] for slot in optimizer.slots}
        for step in range(1, 4):
            given = (arrays["w"], arrays["g"], state, optimizer, 0.07, 1 / 24, step)
            update(*given) if kernels is None else update(*given, kernels)  # type: ignore[arg-type]
        results.append(arrays)
    for name in names:
        if results[0][name].tobytes() != results[1][name].tobytes():
            return f"{name} of {size} elements of {dtype} from {shift}: {optimizer}"
    return None


def main() -> None:
    cases = list(itertools.product(OPTIMIZERS, ("float32", "float64"), SIZES, (0, 1)))
    wrong = [text for case in cases if (text := wrong_in(*case)) is not None]
    print(json.dumps({"cases": len(cases), "wrong": wrong}))


if __name__ == "__main__":
    main()
