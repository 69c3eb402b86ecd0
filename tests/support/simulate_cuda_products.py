"""Rounds and multiplies matrices in the memory of a device; in numba's simulator it prints what differs, as JSON.

``NUMBA_ENABLE_CUDASIM=1 python simulate_cuda_products.py``
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from quick_simulator import short_turns

from dpsim.comm.cuda.memory import DeviceMemory
from dpsim.kernels.allreduce.reference import from_bfloat16, round_to_bfloat16

SIZES = (0, 1, 7, 8, 67, 200)
SHAPES = ((3, 5, 4), (1, 6, 2), (6, 1, 9), (5, 2, 0), (2, 1, 1))
AWKWARD = (0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-40, 1.00390625, 1.01171875, -1.00390625)
"""Numbers that are rounded to infinity, ties, and numbers that are not normal."""


def encodings() -> Iterator[tuple[int, int]]:
    """The arguments of ``wrong_codes``."""
    return itertools.product(SIZES, (0, 1))


def products() -> Iterator[tuple[tuple[int, int, int], bool, bool]]:
    """The arguments of ``wrong_product``."""
    return itertools.product(SHAPES, (False, True), (False, True))


def on_device(memory: Any, values: Any, shift: int = 0) -> Any:
    """The values in the memory, starting ``shift`` numbers after a multiple of 16 bytes."""
    whole = memory.zeros(4 * (values.size + shift)).view(np.float32)
    memory.write(whole[shift:], values.reshape(-1))
    return whole[shift:].reshape(values.shape)


def wrong_codes(size: int, shift: int, memory: Any) -> str | None:
    """What differs, if anything, between the codes of the device and those of the reference; a NaN is any NaN."""
    random = np.random.default_rng([size, shift])
    values = (random.standard_normal(size) * 10.0 ** random.integers(-42, 38, size)).astype(np.float32)
    values[: len(AWKWARD)] = np.array(AWKWARD, np.float32)[:size]
    coded = memory.coded_products().encode("left", on_device(memory, values.reshape(1, size), shift))
    (codes,) = memory.fetch([coded.codes])
    actual, expected = from_bfloat16(codes), from_bfloat16(round_to_bfloat16(values))
    nan = np.isnan(values)
    same = np.isnan(actual[nan]).all() and actual[~nan].tobytes() == expected[~nan].tobytes()
    return None if same else f"codes of {size} numbers from {shift}"


def wrong_product(shape: tuple[int, int, int], left_turned: bool, right_turned: bool, memory: Any) -> str | None:
    """What differs, if anything, between a product on the device and the sums in float64 of what was rounded."""
    rows, columns, inner = shape
    random = np.random.default_rng(list(shape))
    left, right = (random.standard_normal(of).astype(np.float32) for of in ((rows, inner), (inner, columns)))
    multiply = memory.coded_products()
    coded = [
        multiply.encode(place, on_device(memory, np.ascontiguousarray(m.T)).T if turned else on_device(memory, m))
        for place, m, turned in (("left", left, left_turned), ("right", right, right_turned))
    ]
    out = on_device(memory, np.full((rows, columns), np.nan, np.float32))
    multiply.multiply(*coded, out)
    (actual,) = memory.fetch([out])
    left, right = (from_bfloat16(round_to_bfloat16(m)).astype(np.float64) for m in (left, right))
    close = np.allclose(actual, left @ right, rtol=0, atol=2.0**-22 * max(float((abs(left) @ abs(right)).max()), 1e-30))
    return None if close else f"{shape}, {left_turned}, {right_turned}"


if __name__ == "__main__":
    from dpsim.comm.cuda.simulator import SimulatedDevice

    simulated = DeviceMemory(SimulatedDevice())
    with short_turns():
        differing = [wrong_codes(*case, simulated) for case in encodings()]
        differing += [wrong_product(*case, simulated) for case in products()]
    counts = {"encodings": len(list(encodings())), "products": len(list(products()))}
    print(json.dumps(counts | {"wrong": [text for text in differing if text is not None]}))
