"""``Rows``: what the visits of a study measured, one series for each quantity of what was visited."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun
from dpsim.collective import Collective
from dpsim.errors import FileFormatError
from dpsim.machine import NODE

Floats = NDArray[np.float64]


TICK_DIGITS = 9
"""Decimals of a time in seconds that is kept: the clock has nanoseconds."""
LEAST_VISITS = 6
"""Fewer visits than these say too little of a median."""
LEAST_CLEAN_VISITS = 3
"""With fewer clean visits than these the disturbed ones count too."""
CLEAN = "clean"
"""A quantity that tells of each sample of a subject whether other processes left it undisturbed (1) or not (0)."""


def rounded(values: Iterable[float]) -> tuple[float, ...]:
    """Return measured values as records keep them: with ``TICK_DIGITS`` decimals."""
    return tuple(round(float(value), TICK_DIGITS) for value in values)


class ProfiledBatch(Noun, frozen=True, tag="profiled", tag_field="source"):
    """A local batch of a profile, computed on ``devices`` devices at once; ``profile`` counts those of a study.

    A step has ``accumulate`` micro-batches of it.
    Several devices reduce their gradients on ``network`` in every step, and so wait as long as a training there does.
    """

    devices: int
    local_batch: int
    profile: int = 0
    network: str = NODE
    accumulate: int = 1


class CalibratedCollective(Noun, frozen=True, tag="calibrated", tag_field="source"):
    """A collective of a calibration, with nothing else running or by an ``overlap`` mechanism during computation."""

    collective: Collective
    overlap: str = ""
    calibration: int = 0


class CalibratedLoad(Noun, frozen=True, tag="load", tag_field="source"):
    """The load of a calibration: computed on one device, and on ``devices`` at once, back to back."""

    devices: int
    calibration: int = 0


Subject = ProfiledBatch | CalibratedCollective | CalibratedLoad


class Series(Noun, frozen=True):
    """The values of one ``quantity`` of a subject, and the visit of the subject in which each was taken.

    Visits of a subject count from 0. ``part`` is the layer that a time belongs to, or the bytes of a collective. The
    first ``beforehand`` values were taken before the first measured sample. Without visits the values are medians.
    """

    subject: Subject
    quantity: str
    part: int
    visit: tuple[int, ...]
    value: tuple[float, ...]
    beforehand: int = 0

    def early(self) -> Series:
        """Return the values from before the first measured sample."""
        return self._of(slice(self.beforehand))

    def late(self) -> Series:
        """Return the values from between the measured samples, or all where these are of too few visits."""
        late = self._of(slice(self.beforehand, None))
        return late if not self.visit or len({*late.visit}) >= LEAST_VISITS else self._of(slice(None))

    def _of(self, values: slice) -> Series:
        return msgspec.structs.replace(self, visit=self.visit[values], value=self.value[values], beforehand=0)

    def __post_init__(self) -> None:
        if self.visit and len(self.visit) != len(self.value):
            raise FileFormatError(
                f"{len(self.value)} values of {self.quantity} in {len(self.visit)} visits", allowed="a visit for each"
            )


class Rows:
    """The series of a study so far, to which visits add."""

    def __init__(self, series: Iterable[Series] = ()) -> None:
        self._series: dict[tuple[Subject, str, int], tuple[list[int], list[float]]] = {}
        self._beforehand: dict[tuple[Subject, str, int], int] = {}
        self.join(series)

    def add(self, subject: Subject, quantity: str, visit: int, values: Iterable[float], part: int = 0) -> None:
        """Keep the values that a visit took of a quantity, if there are any."""
        if ticks := rounded(values):
            visits, kept = self._series.setdefault((subject, quantity, part), ([], []))
            kept += ticks
            visits += [visit] * len(ticks)

    def join(self, series: Iterable[Series]) -> None:
        """Keep the values that others took."""
        for each in series:
            key = each.subject, each.quantity, each.part
            visits, kept = self._series.setdefault(key, ([], []))
            self._beforehand.setdefault(key, each.beforehand)
            visits += each.visit
            kept += each.value

    def measuring_begins(self) -> None:
        """Note that whatever was kept so far was taken before the first measured sample."""
        self._beforehand = {key: len(values) for key, (_, values) in self._series.items()}

    def next_visit(self, subject: Subject) -> int:
        """Return the number of the subject's next visit."""
        return 1 + max((visits[-1] for key, (visits, _) in self._series.items() if key[0] == subject), default=-1)

    def values(self, subject: Subject, quantity: str, part: int = 0) -> Floats:
        """Return the clean values of a quantity; none where nothing was measured.

        All are returned where it is not known which are clean, or where clean ones are of too few visits.
        """
        return np.array(self._clean(subject, quantity, part)[1])

    def _clean(self, subject: Subject, quantity: str, part: int) -> tuple[list[int], list[float]]:
        visits, values = self._series.get((subject, quantity, part), ([], []))
        of_part = self._series.get((subject, CLEAN, part)) or self._series.get((subject, CLEAN, 0))
        if of_part is None or not visits:
            return visits, values
        marks, taken = _by_visit(*of_part), _by_visit(visits, values)
        pairs = [
            (visit, value)
            for visit, of_visit in taken.items()
            for number, value in enumerate(of_visit)
            if (marked := marks.get(visit)) and (marked[number] if len(marked) == len(of_visit) else any(marked))
        ]
        if len({visit for visit, _ in pairs}) < LEAST_CLEAN_VISITS:
            return visits, values
        return [visit for visit, _ in pairs], [value for _, value in pairs]

    def visit_medians(
        self, subject: Subject, quantity: str, part: int = 0, middle: Callable[[list[float]], object] = np.median
    ) -> Floats:
        """Return the median of the clean values of each visit (see ``values``), or another ``middle``."""
        return np.array([middle(each) for each in _by_visit(*self._clean(subject, quantity, part)).values()])

    def parts(self, subject: Subject, quantity: str) -> tuple[int, ...]:
        """Return the parts of a subject of which the quantity was measured, ascending."""
        return tuple(sorted(part for of, name, part in self._series if (of, name) == (subject, quantity)))

    def series(self) -> tuple[Series, ...]:
        """Return everything that was kept."""
        return tuple(
            Series(
                subject=key[0],
                quantity=key[1],
                part=key[2],
                visit=tuple(visits),
                value=tuple(values),
                beforehand=self._beforehand.get(key, 0),
            )
            for key, (visits, values) in self._series.items()
        )


def with_medians(rows: Sequence[Series], quantities: Collection[str]) -> tuple[Series, ...]:
    """Return the series, those of these quantities as medians: of the clean values of ``early``, and of ``late``."""
    early, late = Rows(each.early() for each in rows), Rows(each.late() for each in rows)

    def medians(of: Series) -> Series:
        taken = (part.values(of.subject, of.quantity, of.part) for part in (early, late))
        values = tuple(float(np.median(each)) for each in taken if len(each))
        return msgspec.structs.replace(of, visit=(), value=values, beforehand=min(of.beforehand, 1))

    return tuple(medians(each) if each.quantity in quantities else each for each in rows)


def _by_visit(visits: Iterable[int], values: Iterable[float]) -> dict[int, list[float]]:
    by_visit: dict[int, list[float]] = {}
    for visit, value in zip(visits, values, strict=True):
        by_visit.setdefault(visit, []).append(value)
    return by_visit
