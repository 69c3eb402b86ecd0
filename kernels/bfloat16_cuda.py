"""bfloat16 codes of float32 numbers in the memory of a GPU: one pass, 4 bytes read and 2 written for each number.

The codes are those of ``dpsim.kernels.allreduce.reference.round_to_bfloat16``; a NaN stays one, perhaps another one.
Importing this loads numba-cuda; in its simulator the kernel runs on NumPy's arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dpsim.kernels.allreduce.cuda.kernels import arguments_on_all, blocks_for, inline, lanes_of, memory, on_all
from dpsim.kernels.allreduce.cuda.prepare import stage

_MOST_BLOCKS = 1 << 10
"""Blocks of a launch; each goes over as many numbers as it must."""
_LANES = lanes_of("bfloat16")
"""Numbers that a thread converts at once: their codes are one 16-byte access."""


@functools.cache
def kernel() -> Any:
    """kernel(*arguments(...)): see ``kernels.on_all``; its addresses are those of the numbers and of the codes."""

    def work(lanes: int) -> Any:
        load, store = memory.load("float32", lanes), memory.store("bfloat16", lanes)

        @inline
        def convert(element, args):  # type: ignore[no-untyped-def]
            numbers, codes = args
            store(codes + 2 * element, load(numbers + 4 * element))

        return convert

    return on_all(work, _LANES)


def arguments(numbers: int, codes: int, length: int) -> tuple[Any, ...]:
    """Return the arguments of the kernel, from the addresses of ``length`` numbers and of their codes."""
    return arguments_on_all((numbers, codes), length, _LANES)


@functools.lru_cache(maxsize=1 << 12)
def encoding(numbers: int, codes: int, length: int) -> Callable[[Any], None]:
    """Return a function that writes the codes in the stream that it is called with, one of numba's.

    The arrays of a training lie where they are from step to step, so each launch is bound once.
    """
    launched = arguments(numbers, codes, length)
    return stage(kernel(), (blocks_for(max(launched[4]), _MOST_BLOCKS), 1), launched)
