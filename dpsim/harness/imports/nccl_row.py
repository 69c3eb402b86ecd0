"""One measurement of nccl-tests and the ways in which it must agree with itself before it is believed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dpsim.errors import FileFormatError
from dpsim.harness.imports.source import MOST_BYTES, Point
from dpsim.units import ITEM_BYTES

WIRE_DTYPES = {"float": "float32", "half": "float16", "bfloat16": "bfloat16"}
"""The types of nccl-tests that can be imported, and what gradients travel as in a table of each."""
BUFFERS = ("out of place", "in place")
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,14})(?:\.([0-9]{1,9}))?(?:e([+-]?[0-9]{1,2}))?")
_REMEDY = "the line may be damaged: copy the file again, or measure again with all_reduce_perf"


@dataclass(frozen=True)
class Rounded:
    """A number as it was printed, and half a unit of its last digit."""

    value: float
    half_unit: float

    @staticmethod
    def parse(text: str) -> Rounded | None:
        """The number of ``12.34`` or ``1.2e+07``; ``None`` of anything else."""
        match = _NUMBER.fullmatch(text)
        if match is None:
            return None
        return Rounded(float(text), 0.5 * 10.0 ** (int(match[3] or 0) - len(match[2] or "")))


@dataclass(frozen=True)
class Row:
    """One measurement: of one size, in place or out of place. Bandwidths are in GB/s (10^9 bytes a second)."""

    place: str
    size_bytes: int
    count: int
    type: str
    redop: str
    root: str
    time_us: Rounded
    algbw: Rounded
    busbw: Rounded
    wrong: float

    def point(self, file: object, devices: int | None) -> Point:
        """The row as a point of a table, once it is known to be a sum over ``devices`` and to add up.

        Its size is that of as many float32 gradients, which 16 bits carry in half the bytes.

        algbw is size / time and busbw algbw x 2 (n-1) / n (nccl-tests, doc/PERFORMANCE.md), within what was rounded.
        Raises ``FileFormatError``.
        """
        kind = {"type": self.type, "redop": self.redop, "root": self.root}
        if self.type not in WIRE_DTYPES or (self.redop, self.root) != ("sum", "-1"):
            raise self._refuse(
                file,
                ", ".join(f"{name} {value}" for name, value in kind.items()),
                f"type {', '.join(WIRE_DTYPES)}, redop sum, root -1",
                "run all_reduce_perf -d float -o sum",
            )
        item_bytes = ITEM_BYTES[WIRE_DTYPES[self.type]]
        if self.count * item_bytes != self.size_bytes or not 0 < self.size_bytes <= MOST_BYTES // 2:
            given = f"{self.count} elements of {self.type} in {self.size_bytes} bytes"
            raise self._refuse(file, given, f"{item_bytes} bytes per element, up to 2^59 bytes", _REMEDY)
        if self.wrong:
            remedy = "these sums were wrong: mend the cause (nccl-tests' README) and measure again"
            raise self._refuse(file, f"#wrong is {self.wrong:g}", "0, or N/A where nothing was checked", remedy)
        self._check_bandwidths(file, devices)
        return Point(self.place, self.count * ITEM_BYTES["float32"], self.time_us.value)

    def _check_bandwidths(self, file: object, devices: int | None) -> None:
        time, half = self.time_us.value, self.time_us.half_unit
        if not 0 < time < math.inf:
            raise self._refuse(file, f"a time of {time} us", "more than 0 us", _REMEDY)
        low, high = self.size_bytes / (time + half) / 1e3, self.size_bytes / max(time - half, 1e-12) / 1e3
        if not _between(low, self.algbw, high):
            given = f"{self.size_bytes} bytes in {time} us with an algbw of {self.algbw.value} GB/s"
            raise self._refuse(file, given, "algbw = size / time", _REMEDY)
        if devices is not None and devices > 1:
            share = 2 * (devices - 1) / devices
            if not _between(low * share, self.busbw, high * share):
                raise self._refuse(
                    file,
                    f"a busbw of {self.busbw.value} GB/s at an algbw of {self.algbw.value} on {devices} devices",
                    f"busbw = algbw x 2 (n-1) / n = algbw x {share:.4g} for an allreduce",
                    "give the output of all_reduce_perf, and --devices N if it does not say how many ran",
                )

    def _refuse(self, file: object, given: str, allowed: str, remedy: str) -> FileFormatError:
        return FileFormatError(f"{file}, {self.place}: {given}", allowed=allowed, remedy=remedy)


def _between(low: float, number: Rounded, high: float) -> bool:
    slack = number.half_unit + 1e-9 * high
    return low - slack <= number.value <= high + slack


def layout_of(hosts: Sequence[str]) -> str:
    """``2x4`` of the hosts of ranks 0 to n-1, where every node has as many, one after the other; else nothing."""
    nodes = list(dict.fromkeys(hosts))
    of_a_node = len(hosts) // max(len(nodes), 1)
    regular = [node for node in nodes for _ in range(of_a_node)] == list(hosts)
    return f"{len(nodes)}x{of_a_node}" if regular and hosts else ""


def counted(names: Sequence[str]) -> str:
    """``8 x NVIDIA H100``, of one name for each device."""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names) if name)


def one_wire_dtype(file: object, types: Sequence[tuple[str, str]]) -> str:
    """The wire dtype of a table, given (place, type) of its rows, which must agree. Raises ``FileFormatError``."""
    for place, type in types:
        if type != types[0][1]:
            raise FileFormatError(
                f"{file}, {place}: type {type} in a table that begins with {types[0][1]}",
                allowed="one type in a table",
                remedy="give each type a file of its own",
            )
    return WIRE_DTYPES[types[0][1]] if types else "float32"
