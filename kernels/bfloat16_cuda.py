"""bfloat16 codes of float32 numbers in the memory of a GPU: one pass, 4 bytes read and 2 written for each number.

The codes are those of ``dpsim.kernels.allreduce.reference.round_to_bfloat16``; a NaN stays one, perhaps another one.
Importing this loads numba-cuda; in its simulator the kernel runs on NumPy's arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dpsim.kernels.allreduce.cuda.kernels import SIMULATED, THREADS, inline, lanes_of, memory, plain, sweep
from dpsim.kernels.allreduce.cuda.prepare import signature

_MOST_BLOCKS = 2 if SIMULATED else 1 << 10
"""Blocks of a launch; each goes over as many numbers as it must. The simulator runs one after another."""
_LANES = lanes_of("bfloat16")
"""Numbers that a thread converts at once: their codes are one 16-byte access."""


@functools.cache
def kernel() -> Any:
    """kernel(0, 1, 0, 0, elements, (address of the numbers, address of the codes)); see ``kernels.plain``."""

    def work(lanes: int) -> Any:
        load, store = memory.load("float32", lanes), memory.store("bfloat16", lanes)

        @inline
        def convert(element, args):  # type: ignore[no-untyped-def]
            numbers, codes = args
            store(codes + 2 * element, load(numbers + 4 * element))

        return convert

    over = sweep(work(_LANES), work(1), _LANES)

    @inline
    def act(step, rank, elements, args):  # type: ignore[no-untyped-def]
        over((0, elements[1], 0, elements[2]), elements, args)

    return plain(act)


def arguments(numbers: int, codes: int, length: int) -> tuple[Any, ...]:
    """The arguments of the kernel, from the addresses of ``length`` numbers and of their codes."""
    packs = 0 if (numbers | codes) % 16 else length // _LANES
    return (0, 1, 0, 0, (0, packs, length - packs * _LANES), (numbers, codes))


@functools.lru_cache(maxsize=1 << 12)
def encoding(numbers: int, codes: int, length: int) -> Callable[[Any], None]:
    """A function that writes the codes in the stream that it is called with, one of numba's.

    The arrays of a training lie where they are from step to step, so each launch is bound once.
    """
    given = arguments(numbers, codes, length)
    _, packs, singles = given[4]
    grid = (min(max(1, -(-max(packs, singles) // THREADS)), _MOST_BLOCKS), 1)
    if SIMULATED:
        return lambda stream: kernel()[grid, THREADS, stream](*given)
    from dpsim.kernels.allreduce.cuda.bound import bind  # loads the driver's bindings

    return bind(kernel().compile(signature(given)), grid, given, ())
