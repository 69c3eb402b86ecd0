"""``MachineComparison``: the cost tables of several machine files beside each other.

``dpsim.harness.compare.machines`` derives it from the files; nothing is computed in this module.
"""

from __future__ import annotations

from dpsim.codec import Noun


class TableKey(Noun, frozen=True, order=True):
    """What a table is of: an allreduce alone (``overlap`` is empty), or during a backward with this mechanism."""

    overlap: str
    algorithm: str
    devices: int
    layout: str
    wire_dtype: str


class TableLine(Noun, frozen=True):
    """The line alpha + bytes / bandwidth that is nearest to a machine's table, and the sizes that the table covers.

    ``bandwidth_bytes_per_s`` is infinite where times do not grow with the size.
    """

    machine: str
    key: TableKey
    alpha_s: float
    bandwidth_bytes_per_s: float
    smallest_bytes: int
    largest_bytes: int


class TimeRatio(Noun, frozen=True):
    """One size in the tables of machines ``a`` and ``b``: ``ratio`` = time on ``b`` / time on ``a``.

    ``interpolated``: one of the tables does not have this size, and its time lies on the line between its neighbours.
    """

    a: str
    b: str
    key: TableKey
    size_bytes: int
    a_time_s: float
    b_time_s: float
    ratio: float
    interpolated: bool


class Unmatched(Noun, frozen=True):
    """A table that machine ``machine`` has and ``other`` has not, or not at a size in common."""

    machine: str
    other: str
    key: TableKey


class MachineComparison(Noun, frozen=True):
    """Machines compared with the first of them."""

    machines: tuple[str, ...]
    lines: tuple[TableLine, ...]
    ratios: tuple[TimeRatio, ...]
    unmatched: tuple[Unmatched, ...]
