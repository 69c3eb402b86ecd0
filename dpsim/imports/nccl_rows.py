"""Rows of nccl-tests: one measurement each, what has to agree in it, and how many ranks its bandwidths tell.

A size is that of the whole array, also of an all-gather and a reduce-scatter, whose count is that of one device
(NVIDIA/nccl-tests, doc/PERFORMANCE.md and src/common.cu, ``TimeTest``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from dpsim.collective import FLAT, CollectiveKind, Layout
from dpsim.imports.lines import Source
from dpsim.imports.tables import MOST_BYTES, WIRE_DTYPES, Point, Rounded
from dpsim.units import ITEM_BYTES

BUFFERS = ("out of place", "in place")
MOST_DEVICES = 1_000_000
WRONG_SUMS = "some sums were wrong: mend the cause (nccl-tests' README) and measure again"
_REMEDY = "the line may be damaged: copy the file again, or measure again with nccl-tests"


class Program(NamedTuple):
    """A program of nccl-tests: what it measures, the redop of its rows, and how often each byte is sent.

    busbw is algbw x ``sends`` (n-1) / n.
    """

    name: str
    kind: CollectiveKind
    redops: tuple[str, ...]
    sends: int


PROGRAMS = (
    Program("all_reduce_perf", "allreduce", ("sum",), 2),
    Program("all_gather_perf", "all-gather", ("none", ""), 1),
    Program("reduce_scatter_perf", "reduce-scatter", ("sum",), 1),
)
NAMES = ", ".join(program.name for program in PROGRAMS)
NAME_IT = (
    "if another program printed the table, name it in a line above, such as # Collective test starting: all_gather_perf"
)


def program_of(name: str) -> Program | None:
    """Return the program of a name such as ``all_gather_perf`` or ``./all_gather_perf_mpi``; ``None``: another one."""
    base = PurePath(name).name
    return next((program for program in PROGRAMS if base.startswith(program.name)), None)


@dataclass(frozen=True)
class Row:
    """One measurement: of one size, in place or out of place. Bandwidths are in GB/s (10^9 bytes a second)."""

    where: int | str
    size_bytes: int
    count: int
    type: str
    redop: str
    root: str
    time_us: Rounded
    algbw: Rounded
    busbw: Rounded
    wrong: float

    @property
    def parts(self) -> float:
        """Size / (count x bytes of an item): 1 of an allreduce, the ranks of an all-gather or a reduce-scatter."""
        item_bytes = ITEM_BYTES[WIRE_DTYPES.get(self.type, "float32")]
        return self.size_bytes / (self.count * item_bytes) if self.count else math.inf

    def _rates(self) -> tuple[float, float]:
        """Return the lowest and highest size / time within what was rounded, in GB/s."""
        time, half = self.time_us
        return self.size_bytes / (time + half) / 1e3, self.size_bytes / max(time - half, 1e-12) / 1e3

    def has_busbw_of(self, devices: int, sends: int) -> bool:
        """Return whether busbw is size / time x ``sends`` (n-1) / n, within what was rounded."""
        low, high = (rate * sends * (devices - 1) / devices for rate in self._rates())
        return _between(low, self.busbw, high)

    def possible_ranks(self, sends: int) -> tuple[float, float]:
        """Return the least and the most ranks n for which busbw / algbw = ``sends`` (n-1) / n within what was rounded.

        An all-gather's and a reduce-scatter's (``sends`` 1) are size / (count x bytes of an item).
        """
        if sends == 1:
            return (self.parts, self.parts) if self.parts == int(self.parts) else (1, math.inf)
        low, high = self._rates()
        low = max(low, self.algbw.value - self.algbw.half_unit)
        high = min(high, self.algbw.value + self.algbw.half_unit)
        shares = (
            max(self.busbw.value - self.busbw.half_unit, 0) / max(high, 1e-12) * (1 - 1e-9),
            (self.busbw.value + self.busbw.half_unit) / max(low, 1e-12) * (1 + 1e-9),
        )
        least, most = (sends / (sends - share) if share < sends else math.inf for share in shares)
        return least, most

    def point(self, source: Source, devices: int | None, program: Program) -> Point:
        """Return the row as a point of a table, once it is known to be of its program and to add up.

        Its size is that of as many float32 gradients, which 16 bits carry in half the bytes. algbw is size / time, and
        busbw is 2 (n-1) / n of that for an allreduce, (n-1) / n for the other two (nccl-tests, doc/PERFORMANCE.md),
        within what was rounded. Until June 2020 the algbw of the other two was their busbw (nccl-tests, issue 45).
        Raises ``FileFormatError``.
        """
        if self.type not in WIRE_DTYPES or self.redop not in program.redops or self.root != "-1":
            raise source.refuse(
                self.where,
                f"type {self.type}, redop {self.redop or 'none'}, root {self.root} in a table of {program.name}",
                allowed=f"type {', '.join(WIRE_DTYPES)}, redop {program.redops[0]}, root -1",
                remedy=f"run {program.name} -d float{' -o sum' * ('sum' in program.redops)}; {NAME_IT}",
            )
        item_bytes = ITEM_BYTES[WIRE_DTYPES[self.type]]
        parts = 1 if program.kind == "allreduce" else devices or 1
        if self.count * item_bytes * parts != self.size_bytes or not 0 < self.size_bytes <= MOST_BYTES // 2:
            problem = f"{self.count} elements of {self.type} in {self.size_bytes} bytes, in a table of {program.name}"
            allowed = f"{item_bytes} bytes per element{f' of each of {parts} devices' * (parts > 1)}, up to 2^59 bytes"
            raise source.refuse(
                self.where,
                problem,
                allowed=allowed,
                remedy=f"{_REMEDY}; {NAME_IT}; give --devices N if the file does not say how many ran",
            )
        if self.wrong:
            raise source.refuse(
                self.where,
                f"#wrong is {self.wrong:g}",
                allowed="0, or N/A where nothing was checked",
                remedy="these sums were wrong: mend the cause (nccl-tests' README) and measure again",
            )
        self._check_bandwidths(source, devices, program)
        where = f"line {self.where}" if isinstance(self.where, int) else self.where
        return Point(where, self.size_bytes // item_bytes * ITEM_BYTES["float32"], self.time_us.value, self.type)

    def _check_bandwidths(self, source: Source, devices: int | None, program: Program) -> None:
        time = self.time_us.value
        if not 0 < time < math.inf:
            raise source.refuse(self.where, f"a time of {time} us", allowed="more than 0 us", remedy=_REMEDY)
        low, high = self._rates()
        before_2020 = program.sends == 1 and self.algbw == self.busbw
        if not _between(low, self.algbw, high) and not before_2020:
            problem = f"{self.size_bytes} bytes in {time} us with an algbw of {self.algbw.value} GB/s"
            raise source.refuse(self.where, problem, allowed="algbw = size / time", remedy=_REMEDY)
        if devices is not None and devices > 1 and not self.has_busbw_of(devices, program.sends):
            share = program.sends * (devices - 1) / devices
            raise source.refuse(
                self.where,
                f"a busbw of {self.busbw.value} GB/s of {self.size_bytes} bytes in {time} us on {devices} devices",
                allowed=f"busbw = size / time x {'2 ' * (program.sends == 2)}(n-1) / n = size / time x {share:.4g}"
                f" for {program.name}",
                remedy=f"give the output of {NAMES}, and --devices N if it does not say how many ran",
            )


def _between(low: float, number: Rounded, high: float) -> bool:
    slack = number.half_unit + 1e-9 * high
    return low - slack <= number.value <= high + slack


def ranks_of(rows: Sequence[Row], sends: int) -> int | None:
    """Return the one number of ranks that the bandwidths of all rows allow; ``None`` where they allow several.

    Where rows contradict one another it is what most of them allow, so that the others are found.
    """
    ranges = [row.possible_ranks(sends) for row in rows if row.size_bytes and 0 < row.time_us.value < math.inf]
    bounds = [
        (math.ceil(least), math.floor(min(most, MOST_DEVICES))) for least, most in ranges if least <= MOST_DEVICES
    ]
    if not bounds:
        return None
    least, most = max(low for low, _ in bounds), min(high for _, high in bounds)
    if least <= most:
        return least if least == most else None
    exact = [low for low, high in bounds if low == high]
    return max(exact, key=lambda n: sum(low <= n <= high for low, high in bounds), default=None)


def layout(hosts: Sequence[str]) -> Layout:
    """Return ``2x4`` of the hosts of ranks 0 to n-1, where every node has as many, one after the other."""
    nodes = list(dict.fromkeys(hosts))
    of_a_node = len(hosts) // max(len(nodes), 1)
    regular = [node for node in nodes for _ in range(of_a_node)] == list(hosts)
    return Layout.of(len(nodes), of_a_node) if regular and hosts else FLAT


def counted(names: Sequence[str]) -> str:
    """Return ``8 x NVIDIA H100``, of one name for each device."""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names) if name)
