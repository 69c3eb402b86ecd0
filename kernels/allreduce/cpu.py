"""The versions for the processes of one machine, in memory that all of them see.

Gradients are produced where they are reduced: nothing is copied in or out. ``SharedGroup`` is what the ranks share
besides: a flag each, and for small arrays a stage on which they show them to each other.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim.kernels.allreduce import algorithms
from dpsim.kernels.allreduce.algorithms import Algorithm
from dpsim.kernels.allreduce.registry import Version, register
from dpsim.kernels.allreduce.steps import (
    MOMENTUM,
    SLOT,
    STAGING,
    WEIGHTS,
    Arrive,
    Region,
    Step,
    Wait,
    moved_elements,
    programs,
)
from dpsim.kernels.allreduce.tree import PartialSums

Array = NDArray[Any]

STAGING_BYTES = 1 << 16
"""The largest array, of all slots of a rank together, that goes over the stage."""

_LINE = 64
_LOOKS = 1 << 17
"""Looks at a flag before a blocking call lets Python see to Ctrl-C: some milliseconds."""


class SharedGroup:
    """Where the ranks of one machine meet.

    ``control`` is zeroed memory of ``control_bytes(size)`` that all of them see; ``oversubscribed``: there are more
    ranks than cores, so who waits yields. All ranks must run the same reductions in the same order, one at a time.

    The stage is double, and each reduction over it takes the other half: a rank can only begin the next but one when
    all have ended the next, and so have long read what it overwrites.
    """

    def __init__(self, rank: int, size: int, control: NDArray[np.uint8], *, oversubscribed: bool) -> None:
        self.rank, self.size, self.oversubscribed = rank, size, oversubscribed
        self._control = control
        self._base = control.ctypes.data
        self.counters = np.zeros(2, np.int64)

    @staticmethod
    def control_bytes(size: int) -> int:
        """Bytes of ``control`` for so many ranks."""
        return size * (_LINE + 2 * STAGING_BYTES)

    def flag(self, rank: int) -> int:
        """The address of a rank's flag, alone on its cache line."""
        return self._base + rank * _LINE

    def stage(self, rank: int, turn: int) -> int:
        """The address of a rank's stage, one of two."""
        return self._base + self.size * _LINE + (2 * rank + turn) * STAGING_BYTES


@functools.cache
def _sched_yield() -> int:
    """The address of the C library's function."""
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


class Sgd(NamedTuple):
    """For the fused update: every rank's weights (in shared memory), and this rank's momentum; 1-D, as the slots."""

    weights: Sequence[Array]
    momentum: Array
    factor: float
    rate: float


class Reduction:
    """A prepared allreduce of arrays in shared memory. After ``run()`` this rank's arrays hold the sum.

    The ``numbers`` may change between runs; ``interpreter`` says which is which.
    """

    def __init__(
        self, function: Callable[[int], int], words: Sequence[int], numbers: Array, meeting: SharedGroup, keep: Any
    ) -> None:
        from dpsim.kernels.allreduce import interpreter as words_of

        self.numbers = numbers
        self._keep = (meeting, keep)
        self._program = np.array(words, np.int64)
        self._state = state = np.zeros(words_of.STATE_WORDS, np.int64)
        state[words_of.COUNTERS] = meeting.counters.ctypes.data
        state[words_of.FLAG] = meeting.flag(meeting.rank)
        state[words_of.PROGRAM] = self._program.ctypes.data
        state[words_of.YIELD] = _sched_yield() if meeting.oversubscribed else 0
        state[words_of.LOOKS_AT] = _LOOKS
        state[words_of.NUMBERS_AT] = numbers.ctypes.data
        self._looks = state[words_of.LOOKS_AT :][:1]
        address = int(state.ctypes.data)
        self._function: Callable[[], int] = functools.partial(function, address)

        def run(_alive: Reduction = self) -> None:
            while function(address):
                os.sched_yield()  # so long a wait is for a rank that has no core

        self.run: Callable[[], None] = run  # a plain function: a method call would cost as much as the call into C

    def advance(self) -> bool:
        """Do what needs no waiting; whether all is done. For other work between."""
        self._looks[0] = 1
        unfinished = self._function()
        self._looks[0] = _LOOKS
        return not unfinished


def _make(algorithm: Algorithm, sgd_algorithm: Algorithm | None = None) -> Callable[..., Reduction]:
    """The ``make`` of a version: ``make(meeting, arrays, slots, scale=1.0, compression=None, each_sum=False,
    sgd=None)``.
    """

    def make(
        meeting: SharedGroup,
        arrays: Sequence[Array],
        slots: PartialSums,
        *,
        scale: float = 1.0,
        compression: tuple[str, float] | None = None,
        each_sum: bool = False,
        sgd: Sgd | None = None,
    ) -> Reduction:
        """Prepare an allreduce of ``arrays``, one a slot: 1-D, contiguous, in shared memory, of one dtype and length.

        The sum comes to each rank's first slot; what its other slots hold then is not defined. ``compression``: the
        16-bit dtype and the power of two by which numbers are scaled in it; with ``each_sum`` the arrays are rounded to
        it already, and every sum of two is, which every version can do.
        """
        steps = (sgd_algorithm if sgd and sgd_algorithm else algorithm)(slots, arrays[0].size)
        return _Lowering(meeting, arrays, slots, scale, compression, each_sum, sgd).reduction(steps)

    return make


class _Lowering:
    """Turns the steps of this rank into the words of its program."""

    def __init__(
        self,
        meeting: SharedGroup,
        arrays: Sequence[Array],
        slots: PartialSums,
        scale: float,
        compression: tuple[str, float] | None,
        each_sum: bool,
        sgd: Sgd | None,
    ) -> None:
        self._meeting, self._arrays, self._slots = meeting, arrays, slots
        self._scaled, self._compression, self._each_sum, self._sgd = scale != 1.0, compression, each_sum, sgd
        power = compression[1] if compression else 1.0
        factor, rate = (sgd.factor, sgd.rate) if sgd else (0.0, 0.0)
        self._numbers = np.array([scale, 1 / power, power, factor, rate], arrays[0].dtype)
        self._kinds: dict[Any, int] = {}

    def reduction(self, steps: Sequence[Step]) -> Reduction:
        from dpsim.kernels.allreduce import interpreter

        meeting = self._meeting
        plan = programs(steps, self._slots.owners)
        staged = any(piece.memory == STAGING for step in steps for piece in step.outputs)
        bodies = []
        for turn in (0, 1) if staged else (0,):
            body = list(itertools.chain(*(self._words(one, turn) for one in plan.of[meeting.rank])))
            bodies.append([*body, interpreter.END, plan.arrivals, int(staged)])
        words = [interpreter.TURN, len(bodies[0]), *bodies[0], *bodies[1]] if staged else bodies[0]
        function = interpreter.interpreter(self._arrays[0].dtype.name, tuple(self._kinds))
        return Reduction(function, words, self._numbers, meeting, (self._arrays, self._sgd))

    def _words(self, one: Step | Arrive | Wait, turn: int) -> list[int]:
        from dpsim.kernels.allreduce import interpreter

        if isinstance(one, Arrive):
            return [interpreter.ARRIVE, one.number]
        if isinstance(one, Wait):
            return [interpreter.WAIT, self._meeting.flag(one.rank), one.number]
        each_sum = self._each_sum and len(one.sources) > 1
        rounds = each_sum if self._each_sum else one.final
        kind = interpreter.Kind(
            one.tree,
            len(one.sources),
            len(one.outputs),
            scaled=one.final and self._scaled,
            compression=self._compression[0] if self._compression and rounds else "",
            each_sum=each_sum,
            sgd=one.update is not None,
        )
        number = self._kinds.setdefault(kind, len(self._kinds))
        places = [self._address(piece, turn) for piece in (*one.sources, *one.outputs, *(one.update or ()))]
        return [interpreter.SUMS + number, one.sources[0].elements, *places]

    def _address(self, piece: Region, turn: int) -> int:
        itemsize = self._arrays[0].itemsize
        if piece.memory == STAGING:
            owner = self._slots.owners[piece.number]
            place = self._slots.of(owner).index(piece.number)
            size = -(-self._arrays[0].nbytes // _LINE) * _LINE
            base = self._meeting.stage(owner, turn) + place * size
        elif piece.memory == SLOT:
            base = self._arrays[piece.number].ctypes.data
        else:
            assert self._sgd is not None
            array = {WEIGHTS: self._sgd.weights[piece.number], MOMENTUM: self._sgd.momentum}[piece.memory]
            base = array.ctypes.data
        return int(base + piece.start * itemsize)


_COUNTED = 16 * 840
"""Elements of the arrays for which steps are counted: slices of 2 to 8 ranks are whole lines."""


def _bytes_moved(algorithm: Algorithm) -> Callable[[PartialSums, int], float]:
    return lambda slots, size_bytes: moved_elements(algorithm(slots, _COUNTED)) / _COUNTED * size_bytes


def _synchronisations(algorithm: Algorithm) -> Callable[[PartialSums], int]:
    return lambda slots: programs(algorithm(slots, _COUNTED), slots.owners).synchronisations


for _name, _algorithm, _with_sgd, _summary, _variants, _most_bytes in (
    (
        "halving-doubling",
        algorithms.halving_doubling,
        None,
        "pairs add one half each, nearest first, and copy back",
        ("scale",),
        None,
    ),
    (
        "ring",
        algorithms.ring,
        None,
        "each chunk goes around twice; a rank adds what completes a subtree",
        ("scale",),
        None,
    ),
    (
        "one-shot",
        algorithms.one_shot,
        None,
        "everyone shows its array on a stage and adds them all: one wait",
        ("scale", "compression"),
        STAGING_BYTES,
    ),
    (
        "two-shot",
        algorithms.two_shot,
        algorithms.two_shot_sgd,
        "rank r adds slice r of everyone's array in place and writes it to all",
        ("scale", "compression", "sgd"),
        None,
    ),
):
    register(
        Version(
            name=_name,
            backend="cpu",
            summary=_summary,
            bytes_moved=_bytes_moved(_algorithm),
            synchronisations=_synchronisations(_algorithm),
            variants=_variants,
            most_bytes=_most_bytes,
            make=_make(_algorithm, _with_sgd),
        )
    )
