"""The versions for the processes of one machine, in memory that all of them see.

Gradients are produced where they are reduced: nothing is copied in or out. Besides, the ranks share a ``SharedGroup``:
a flag each, and staging memory into which small arrays are copied for the other ranks to read.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpsim.kernels.allreduce import algorithms
from dpsim.kernels.allreduce.algorithms import Algorithm
from dpsim.kernels.allreduce.registry import Version, register
from dpsim.kernels.allreduce.shards import line_bound
from dpsim.kernels.allreduce.steps import STAGING, Arrive, Region, Step, Wait, moved_elements, programs
from dpsim.kernels.allreduce.tree import PartialSums

if TYPE_CHECKING:
    from dpsim.kernels.allreduce.interpreter import Kind

Array = NDArray[Any]

STAGING_BYTES = 1 << 16
"""The most that a rank copies to staging memory: all its partial sums together."""

_LINE_BYTES = 64
_LOOKS = 1 << 17
"""How often a blocking call reads a flag before it returns to Python, which then handles Ctrl-C: some milliseconds."""


class SharedGroup:
    """The flags and the staging memory of the ranks of one machine.

    ``control`` is zeroed memory of ``control_bytes(size)`` that all of them see; ``oversubscribed``: there are more
    ranks than cores, so waiting ranks yield theirs. All ranks must run the same reductions in the same order, one at a
    time. ``on_long_wait`` is called again and again by a blocking call whose wait takes longer than some milliseconds:
    then a rank that is awaited has no core, or has ended.

    Staging memory is double, and reductions that use it take the two halves in turn: a rank begins the reduction after
    the next only when all ranks have ended the next one, and so have read what it overwrites.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        control: NDArray[np.uint8],
        *,
        oversubscribed: bool,
        on_long_wait: Callable[[], object] = os.sched_yield,
    ) -> None:
        self.rank, self.size, self.oversubscribed, self.on_long_wait = rank, size, oversubscribed, on_long_wait
        self._control = control
        self._base = control.ctypes.data
        self.counters = np.zeros(2, np.int64)

    @staticmethod
    def control_bytes(size: int) -> int:
        """Return bytes of ``control`` for so many ranks."""
        return size * (_LINE_BYTES + 2 * STAGING_BYTES)

    def flag(self, rank: int) -> int:
        """Return the address of a rank's flag, alone on its cache line."""
        return self._base + rank * _LINE_BYTES

    def staging(self, rank: int, turn: int) -> int:
        """Return the address of a rank's staging memory; ``turn`` 0 or 1 is the half."""
        return self._base + self.size * _LINE_BYTES + (2 * rank + turn) * STAGING_BYTES


@functools.cache
def _sched_yield() -> int:
    """Return the address of the C library's function."""
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


class Reduction:
    """A prepared allreduce of arrays in shared memory. ``run()`` returns when this rank has the sum.

    It is also its own only request: ``start()`` yields it, and ``done()`` moves it on.
    """

    def __init__(
        self, function: Callable[[int], int], words: Sequence[int], numbers: Array, group: SharedGroup, keep: Any
    ) -> None:
        from dpsim.kernels.allreduce import interpreter as layout

        self._keep = (group, numbers, keep)
        self._program = np.array(words, np.int64)
        self._state = state = np.zeros(layout.STATE_WORDS, np.int64)
        state[layout.COUNTERS] = group.counters.ctypes.data
        state[layout.FLAG] = group.flag(group.rank)
        state[layout.PROGRAM] = self._program.ctypes.data
        state[layout.YIELD] = _sched_yield() if group.oversubscribed else 0
        state[layout.LOOKS_AT] = _LOOKS
        state[layout.NUMBERS_AT] = numbers.ctypes.data
        self._looks = state[layout.LOOKS_AT :][:1]
        address = int(state.ctypes.data)
        self._function: Callable[[], int] = functools.partial(function, address)

        def run(_alive: Reduction = self) -> None:
            while function(address):
                group.on_long_wait()

        self.run: Callable[[], None] = run  # a plain function: a method call would cost as much as the call into C

    def start(self) -> Generator[list[Reduction], None, None]:
        yield [self]

    def done(self) -> bool:
        """Do as much as needs no waiting, and return whether all is done."""
        self._looks[0] = 1
        unfinished = self._function()
        self._looks[0] = _LOOKS
        return not unfinished

    def due_s(self) -> float | None:
        return None


@dataclass(frozen=True)
class _Words:
    """The words of a rank's program, and the ``kinds`` of sums in them, each with its number."""

    group: SharedGroup
    arrays: Sequence[Array]
    sums: PartialSums
    scaled: bool
    compression: str
    each_sum: bool
    kinds: dict[Kind, int] = field(default_factory=dict)

    def of(self, operation: Step | Arrive | Wait, turn: int) -> list[int]:
        """Return the words of one operation, in a half of the staging memory."""
        from dpsim.kernels.allreduce import interpreter

        if isinstance(operation, Arrive):
            return [interpreter.ARRIVE, operation.number]
        if isinstance(operation, Wait):
            return [interpreter.WAIT, self.group.flag(operation.rank), operation.number]
        sources, outputs, adds = operation.sources, operation.outputs, len(operation.sources) > 1
        rounds = adds if self.each_sum else operation.final
        kind = interpreter.Kind(
            operation.tree,
            len(sources),
            len(outputs),
            scaled=operation.final and self.scaled,
            compression=self.compression if rounds else "",
            each_sum=self.each_sum and adds,
        )
        number = self.kinds.setdefault(kind, len(self.kinds))
        addresses = [self._address(region, turn) for region in (*sources, *outputs)]
        return [interpreter.SUMS + number, sources[0].elements, *addresses]

    def _address(self, region: Region, turn: int) -> int:
        base = int(self.arrays[region.number].ctypes.data)
        if region.memory == STAGING:
            owner = self.sums.owners[region.number]
            pitch = -(-self.arrays[0].nbytes // _LINE_BYTES) * _LINE_BYTES
            base = self.group.staging(owner, turn) + self.sums.of(owner).index(region.number) * pitch
        return base + region.start * self.arrays[0].itemsize


def _make(algorithm: Algorithm) -> Callable[..., Reduction]:
    """Return the ``make`` of a version."""

    def make(
        group: SharedGroup,
        arrays: Sequence[Array],
        sums: PartialSums,
        *,
        scale: float = 1.0,
        compression: tuple[str, float] | None = None,
        each_sum: bool = False,
    ) -> Reduction:
        """Prepare an allreduce of ``arrays``, the partial sums: 1-D, contiguous, in shared memory, alike in dtype and
        length.

        The sum lands in each rank's first partial sum; what its others hold then is not defined. ``compression``: the
        16-bit dtype and the power of two by which numbers are scaled in it; with ``each_sum`` the arrays are rounded to
        it already, and every sum of two is, which every version can do.
        """
        from dpsim.kernels.allreduce import interpreter

        listed = algorithm(sums)
        steps = listed.scaled(line_bound(arrays[0].size, listed.units))
        plan = programs(steps, sums.owners)
        staged = any(region.memory == STAGING for step in steps for region in step.outputs)
        wire_dtype, power = compression or ("", 1.0)
        written = _Words(group, arrays, sums, scaled=scale != 1.0, compression=wire_dtype, each_sum=each_sum)
        bodies = []
        for turn in (0, 1) if staged else (0,):
            body = itertools.chain(*(written.of(operation, turn) for operation in plan.of[group.rank]))
            bodies.append([*body, interpreter.END, plan.arrivals, int(staged)])
        program = [interpreter.TURN, len(bodies[0]), *bodies[0], *bodies[1]] if staged else bodies[0]
        function = interpreter.interpreter(arrays[0].dtype.name, tuple(written.kinds))
        return Reduction(function, program, np.array([scale, 1 / power, power], arrays[0].dtype), group, arrays)

    return make


def shard_kernel(kind: str, replicas: int = 1) -> Callable[..., Reduction]:
    """Return what makes a collective of shards (``algorithms.of_shards``), as a version's ``make`` does."""
    return _make(lambda sums: algorithms.of_shards(kind, sums, replicas))


def _bytes_moved(algorithm: Algorithm) -> Callable[[PartialSums, int], float]:
    def count(sums: PartialSums, size_bytes: int) -> float:
        listed = algorithm(sums)
        return moved_elements(listed.steps) / listed.units * size_bytes

    return count


def _synchronisations(algorithm: Algorithm) -> Callable[[PartialSums], int]:
    return lambda sums: programs(algorithm(sums).steps, sums.owners).synchronisations


_SUMMARIES = {
    "halving-doubling": "pairs add one half each, nearest first, and copy back",
    "ring": "each chunk goes around twice; a rank adds what completes a subtree",
    "one-shot": "every rank copies its array to staging memory and adds them all: one wait",
    "two-shot": "rank r adds slice r of everyone's array in place and writes it to all",
}
for _name, _algorithm in algorithms.IN_TREE_ORDER.items():
    register(
        Version(
            name=_name,
            backend="cpu",
            summary=_SUMMARIES[_name],
            bytes_moved=_bytes_moved(_algorithm),
            synchronisations=_synchronisations(_algorithm),
            variants=("scale", "compression") if _name in ("one-shot", "two-shot") else ("scale",),
            most_bytes=STAGING_BYTES if _name == "one-shot" else None,
            make=_make(_algorithm),
        )
    )
