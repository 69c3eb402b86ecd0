"""Cases for the CUDA kernels, in the simulator and on a GPU: what is given, and what the reference makes of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from wire_reference import rounded

from dpsim.kernels.allreduce import reference
from dpsim.kernels.allreduce.cuda import Codes, Launch, Momentum
from dpsim.kernels.allreduce.registry import Version
from dpsim.kernels.allreduce.tree import Slots, slots

Array = Any
VERSIONS = ("ring", "halving-doubling", "one-shot", "two-shot")
DTYPES = ("float16", "bfloat16", "float32", "float64")
BOUNDS = {
    1: [0, 1], 2: [0, 1, 2], 3: [0, 1, 2, 3], 4: [0, 1, 2, 3, 4], 5: [0, 1, 2, 3, 4, 5], 8: list(range(9)),
    # ranks that hold several slots: 2 of 3 and 5 leaves, 3 of 3, 2 and 3
    102: [0, 3, 8], 103: [0, 3, 5, 8],
}  # fmt: skip
"""Leaves of ranks; below 100: one a rank."""
GUARD = 64
"""Bytes before and after each array that nobody may write."""


@dataclass(frozen=True)
class Case:
    """``ranks``: a key of BOUNDS; ``shifts``: elements by which the slots' arrays start off a multiple of 16 bytes."""

    version: str
    dtype: str
    ranks: int
    length: int
    shifts: tuple[int, ...] = (0,)
    variant: str = "scale"
    apart: bool = False
    scale: float = 1.0

    @property
    def slots(self) -> Slots:
        return slots(BOUNDS[self.ranks])


def covering() -> Iterator[Case]:
    """Every version, dtype and rank count, with lengths and alignments that differ from one to the next."""
    lengths = itertools.cycle((33, 1, 0, 100, 7, 64, 259))
    shifts = itertools.cycle(((0,), (1,), (3,), (0, 1)))
    apart = itertools.cycle((False, True, False))
    scales = itertools.cycle((1.0, 1 / 3))
    for dtype, version, ranks in itertools.product(DTYPES, VERSIONS, BOUNDS):
        yield Case(version, dtype, ranks, next(lengths), next(shifts), "scale", next(apart), next(scales))
    for variant, ranks in itertools.product(("float16", "bfloat16", "sgd"), BOUNDS):
        yield Case("two-shot", "float32", ranks, next(lengths), next(shifts), variant, next(apart), next(scales))
    yield Case("two-shot", "float64", 3, 45, (1,), "sgd", False, 1 / 7)


class Memory:
    """The arrays of a case, each somewhere inside a buffer whose rest nobody may write.

    ``place(bytes)`` puts a buffer of bytes where the kernels are to find it.
    """

    def __init__(self, case: Case, place: Callable[[Array], Array]) -> None:
        self.case, self.place = case, place
        self.random = np.random.default_rng([case.ranks, DTYPES.index(case.dtype), case.length])
        self.buffers: list[tuple[Array, Array, int, int]] = []
        self.owners = case.slots.owners
        self.inputs = [self._numbers() for _ in self.owners]
        self.arrays = [self._array(values, i) for i, values in enumerate(self.inputs)]
        w, v = self._numbers(), self._numbers()
        ranks = len(set(self.owners))
        if case.variant == "sgd":
            self.w, self.v = ([self._array(values, 0) for _ in range(ranks)] for values in (w, v))
        if case.variant in ("float16", "bfloat16"):
            self.codes = [self._array(np.zeros(case.length, np.uint16), i) for i in range(len(self.owners))]
        self.expected = self._expected(w, v)

    def _numbers(self) -> Array:
        """Numbers of many sizes, of which sums depend on the order."""
        numbers = self.random.standard_normal(self.case.length) * 2.0 ** self.random.integers(-12, 12, self.case.length)
        if self.case.dtype == "bfloat16":
            return reference.round_to_bfloat16(numbers.astype(np.float32))
        return numbers.astype(self.case.dtype)

    def _array(self, values: Array, number: int) -> Array:
        shift = self.case.shifts[number % len(self.case.shifts)] * values.itemsize
        host = np.full(16 + 2 * GUARD + shift + values.nbytes, 0xA5, np.uint8)
        aligned = -host.ctypes.data % 16 if self.place is np.asarray else 0
        start = aligned + GUARD + shift
        host[start : start + values.nbytes] = values.view(np.uint8)
        buffer = self.place(host)
        self.buffers.append((buffer, host.copy(), start, values.nbytes))
        return buffer[start : start + values.nbytes].view(values.dtype)

    def prepared(self, version: Version, *, mode: str, apart: bool) -> Sequence[Sequence[Callable[[Any], None]]]:
        """What to run, one group after another: with ``apart`` the ranks' stages side by side, else all at once."""
        options: dict[str, Any] = {"mode": mode, "scale": self.case.scale}
        if self.case.variant == "sgd":
            options["sgd"] = Momentum(w=self.w, v=self.v, momentum=0.9, rate=0.1)
        elif self.case.variant != "scale":
            options["wire"] = Codes(dtype=self.case.variant, scale=self.wire_scale, arrays=self.codes)
        launches: list[Launch] = [
            version.make(self.arrays, self.case.slots, rank=rank, **options)
            for rank in (range(len(set(self.owners))) if apart else (None,))
        ]
        return list(zip(*(launch.stages for launch in launches), strict=True))

    @property
    def wire_scale(self) -> float:
        return 2.0**-6 if self.case.variant == "float16" else 1.0

    def _expected(self, w: Array, v: Array) -> list[tuple[str, int, Array]]:
        """(which arrays, whose, what they shall hold)."""
        case, tree = self.case, self.case.slots
        firsts = [self.owners.index(rank) for rank in range(len(set(self.owners)))]
        if case.variant == "sgd":
            new_w, new_v = reference.sgd(self.inputs, tree, w, v, scale=case.scale, momentum=0.9, rate=0.1)
            unchanged = [("arrays", i, values) for i, values in enumerate(self.inputs)]
            return [("w", r, new_w) for r in range(len(firsts))] + [("v", r, new_v) for r in range(len(firsts))] + unchanged
        if case.variant in ("float16", "bfloat16"):
            sent = [rounded(values, case.variant, self.wire_scale) for values in self.inputs]
            result = rounded(reference.allreduce(sent, tree), case.variant, self.wire_scale)
            result = result * np.float32(case.scale)
        elif case.dtype == "bfloat16":
            decoded = [reference.from_bfloat16(codes) for codes in self.inputs]
            result = reference.round_to_bfloat16(reference.allreduce(decoded, tree, case.scale))
        elif case.dtype == "float16":
            decoded = [values.astype(np.float32) for values in self.inputs]
            result = reference.allreduce(decoded, tree, case.scale).astype(np.float16)
        else:
            result = reference.allreduce(self.inputs, tree, case.scale)
        return [("arrays", slot, result) for slot in firsts]

    def wrong(self, fetch: Callable[[Array], Array] = np.asarray) -> str | None:
        """What differs from what is expected, to the bit, and what was written that should not have been."""
        for name, number, expected in self.expected:
            found = fetch(getattr(self, name)[number])
            if found.tobytes() != expected.tobytes():
                at = int(np.flatnonzero(found != expected)[0])
                return f"{name}[{number}][{at}] is {found[at]}, not {expected[at]}"
        for number, (buffer, before, start, size) in enumerate(self.buffers):
            after = fetch(buffer)
            if (after[:start] != before[:start]).any() or (after[start + size :] != before[start + size :]).any():
                return f"something was written outside of array {number}"
        return None
