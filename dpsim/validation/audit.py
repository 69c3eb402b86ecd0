"""What is wrong in published tables: copied rows, times that no wire allows, times that fall with size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dpsim.columns import Column, Row
from dpsim.grouping import grouped
from dpsim.units import format_bandwidth, format_duration, format_size
from dpsim.validation.published import PublishedRow, PublishedSet

FALL = 0.97
"""A time below this share of the time of a smaller size is doubtful."""
SUPERLINEAR = 1.01
"""A throughput above this multiple of one device's times the devices is doubtful."""
_DIGITS, _LEAST_COPIES = 5, 2


class Doubt(Row):
    """Something in a published table that cannot be, or is hardly so."""

    dataset = Column["Doubt", str]("name", "The set.")
    lines = Column["Doubt", str]("text", "The lines of the CSV file.")
    kind = Column["Doubt", str]("name", "`copied`, `too fast`, `falls with size` or `superlinear`.")
    text = Column["Doubt", str]("text", "What is wrong.")


def audit(sets: Mapping[str, PublishedSet]) -> list[Doubt]:
    """Return the doubts about all sets. Sealed rows are passed over."""
    return [doubt for published in sets.values() for check in CHECKS for doubt in check(published)]


class _Timed(NamedTuple):
    """A row of an allreduce table: its line, size, devices and time."""

    line: int
    size_bytes: int
    devices: int
    seconds: float


def _tables(published: PublishedSet) -> dict[tuple[str, ...], list[_Timed]]:
    """Return the rows of each allreduce table of a set, by size; none where it has no sizes."""
    columns = [c for c, column in published.provenance.columns.items() if column.unit in ("name", "count")]
    key_columns = [c for c in columns if c != "implementation"]
    tables: dict[tuple[str, ...], list[_Timed]] = {}
    for row in published.rows:
        if row.outcome is not None and "size_bytes" in row.values:
            timed = _Timed(row.line, row.values["size_bytes"], row.values["devices"], row.outcome)
            tables.setdefault(tuple(f"{c} {row.values.get(c, '')}" for c in key_columns), []).append(timed)
    return {key: sorted(rows, key=lambda row: row.size_bytes) for key, rows in tables.items()}


def copied(published: PublishedSet) -> Iterator[Doubt]:
    """Yield tables that share times to five digits at two sizes or more, and other rows with equal outcomes."""
    for (first, rows), (second, others) in itertools.combinations(_tables(published).items(), 2):
        times = {row.size_bytes: row for row in rows}
        pairs = [(times[other.size_bytes], other) for other in others if other.size_bytes in times]
        same = [(a, b) for a, b in pairs if _same(a.seconds, b.seconds)]
        if len(same) >= _LEAST_COPIES:
            yield Doubt(
                dataset=published.name,
                lines=", ".join(f"{a.line} and {b.line}" for a, b in same),
                kind="copied",
                text=f"{', '.join(second)}: has the times of {', '.join(first)} at {len(same)} of {len(pairs)} sizes",
            )

    steps = (
        row
        for row in published.rows
        if row.outcome is not None and "size_bytes" not in row.values and len(_digits(row.outcome)) >= _DIGITS
    )
    for outcome, equal in grouped(steps, lambda row: f"{row.outcome:.9g}").items():
        if len(equal) > 1:
            yield Doubt(
                dataset=published.name,
                lines=", ".join(str(row.line) for row in equal),
                kind="copied",
                text=f"{len(equal)} rows have the outcome {outcome}: one measurement, or a copy",
            )


def too_fast(published: PublishedSet) -> Iterator[Doubt]:
    """Yield allreduces that would send more than the set's fastest link can: 2 (n-1)/n M / time above it."""
    link = published.provenance.fastest_link_bytes_per_s
    for line, size_bytes, devices, seconds in itertools.chain(*_tables(published).values()) if link else ():
        sent = 2 * (devices - 1) / devices * size_bytes / seconds
        if sent > link:
            yield Doubt(
                dataset=published.name,
                lines=str(line),
                kind="too fast",
                text=f"{format_size(size_bytes)} on {devices} devices in {format_duration(seconds)} needs "
                f"{format_bandwidth(sent)} from each device, but its link has {format_bandwidth(link)}",
            )


def falling(published: PublishedSet) -> Iterator[Doubt]:
    """Yield allreduces that take less than 0.97 times as long as one of fewer bytes in the same table."""
    for key, rows in _tables(published).items():
        for before, row in itertools.pairwise(rows):
            if row.seconds < FALL * before.seconds:
                yield Doubt(
                    dataset=published.name,
                    lines=f"{before.line} and {row.line}",
                    kind="falls with size",
                    text=f"{', '.join(key)}: {format_size(before.size_bytes)} takes "
                    f"{format_duration(before.seconds)}, but {format_size(row.size_bytes)} only "
                    f"{format_duration(row.seconds)}",
                )


def superlinear(published: PublishedSet) -> Iterator[Doubt]:
    """Yield throughputs more than 1 % above that of one device of the same row times the number of devices."""
    if published.provenance.outcome != "images_per_s":
        return
    other = [c for c in published.provenance.columns if c not in _OF_DEVICES]

    def key(row: PublishedRow) -> tuple[object, ...]:
        return tuple(row.values.get(column, "") for column in other)

    single = {key(row): row for row in published.rows if row.values.get("devices") == 1 and row.outcome}
    for row in published.rows:
        alone, devices = single.get(key(row)), row.values.get("devices", 1)
        if row.outcome and alone is not None and alone.outcome and devices > 1:
            gain = row.outcome / alone.outcome / devices
            if gain > SUPERLINEAR:
                yield Doubt(
                    dataset=published.name,
                    lines=f"{alone.line} and {row.line}",
                    kind="superlinear",
                    text=f"{devices} devices are {gain * devices:.3g} times as fast as one",
                )


CHECKS = (copied, too_fast, falling, superlinear)
_OF_DEVICES = ("devices", "layout", "images_per_s", "images_per_s_sd")


def _same(one: float, other: float) -> bool:
    """Return whether two times are equal to five digits, and have as many."""
    return f"{one:.{_DIGITS - 1}e}" == f"{other:.{_DIGITS - 1}e}" and len(_digits(one)) >= _DIGITS


def _digits(value: float) -> str:
    """Return the digits that a number has, without zeros at the end."""
    return f"{value:.9e}".partition("e")[0].replace(".", "").rstrip("0")
