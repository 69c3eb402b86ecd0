"""Runs the optimizers' CUDA kernels beside those of the CPU; in numba's simulator it prints what differs, as JSON.

``NUMBA_ENABLE_CUDASIM=1 python simulate_cuda_updates.py``
"""

from __future__ import annotations

import itertools
import json
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from quick_simulator import short_turns

from dpsim.kernels import update_cuda
from dpsim.memory import HOST, HostMemory
from dpsim.nn.optimizer import LarsUpdate, Part, update
from dpsim.optimizer import AdamW, Lars, Optimizer, Sgd

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


LARS_SHAPES = [(3, 5), (4,), (5, 3), (2, 0), (2, 2), (6,)]
LARS_CASES = (("float32", 0.01, "", 2), ("float32", 0.0, "inf", 1), ("float64", 0.01, "nan", 1))


def wrong_in_lars(dtype: str, decay: float, spoilt: str, steps: int, memory: Any) -> str | None:
    """What differs after some steps of LARS between arrays of a device's memory and the host's.

    Some tensors are all zero, others of tiny numbers; ``spoilt``: an element that the gradients of a tensor have.
    """
    settings = Lars(momentum=0.9, weight_decay=decay, trust_coefficient=0.02)
    bounds = np.cumsum([0, *(int(np.prod(shape)) for shape in LARS_SHAPES)]).tolist()
    matrices = [number for number, shape in enumerate(LARS_SHAPES) if len(shape) > 1]
    parts = [
        Part(matrices.index(number) if number in matrices else None, start, start, stop - start, start)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
    random = np.random.default_rng(5)
    w, g = random.standard_normal((2, bounds[-1])) * 10.0 ** random.integers(-30, 15, (2, bounds[-1]))
    w[:15] = g[19:21] = 0
    g[21:34] *= 1e-25 if dtype == "float32" else 1e-165
    if spoilt:
        g[-7] = float(spoilt)
    results = []
    for where in (HOST, memory):
        arrays = [where.zeros(bounds[-1] * np.dtype(dtype).itemsize).view(dtype) for _ in range(3)]
        for target, values in zip(arrays, (w, g), strict=False):
            where.write(target, values.astype(dtype))
        update, digits = LarsUpdate(*arrays, parts, len(matrices), settings, where), []
        for step in range(steps):
            digits += [np.array(each) for each in where.fetch([update.measure()])]
            with np.errstate(invalid="ignore"):
                update.apply(digits[-1], 0.3 / (1 + step), 0.25)
        results.append([*digits, *map(np.array, where.fetch(arrays))])
    for name, ours, theirs in zip(("digits",) * steps + ("w", "g", "v"), *results, strict=True):
        if not np.array_equal(ours, theirs, equal_nan=True):
            return f"{name} of LARS in {dtype}, decay {decay}, {spoilt or 'finite'}"
    return None


class SimulatedMemory(HostMemory):
    """The host's memory as that of a device in the simulator."""

    deferred = True
    stream = types.SimpleNamespace(launch=0)


def main() -> None:
    every = list(cases())
    wrong = [text for case in every if (text := wrong_in(*case)) is not None]
    wrong += [text for lars in LARS_CASES if (text := wrong_in_lars(*lars, SimulatedMemory())) is not None]
    print(json.dumps({"cases": len(every) + len(LARS_CASES), "wrong": wrong}))


if __name__ == "__main__":
    with short_turns():
        main()
