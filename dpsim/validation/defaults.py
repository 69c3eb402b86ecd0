"""What published machines leave open, estimated for the steps of one cluster from the steps of all others.

A prediction of a published step uses no default that its own cluster influenced: neither a value nor a width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dpsim.grouping import grouped
from dpsim.model.defaults import DEFAULTS, WIDTHS, Default, with_defaults
from dpsim.uncertainty import IntervalWidth
from dpsim.validation.case import Case, parts
from dpsim.validation.inputs import Fill, RowInputs, fitted_step_inputs, outcome_s
from dpsim.validation.judge import JudgedRow
from dpsim.validation.published import PublishedSet
from dpsim.validation.widths import widths_by_cell

Floats = NDArray[np.float64]
_ALIKE = 1e-3
"""Mean misfits that differ by no more are as good as each other."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The values of a default that are tried on a cluster; those of a ``ratio`` are apart by their logarithms."""

    values: tuple[float, ...]
    ratio: bool = True

    def away(self, first: Floats, second: float) -> Floats:
        """Return how far apart values are."""
        apart: Floats = np.log(first / second) if self.ratio else first - second
        return apart


TRIED: Mapping[str, Tried] = {
    "compute_slowdown": Tried(values=(1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.08, 1.1, 1.13, 1.2, 1.3, 1.5)),
    "loss_growth": Tried(values=(0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.09), ratio=False),
    "fixed_share": Tried(values=(0.01, 0.03, 0.05, 0.07, 0.09, 0.12, 0.16, 0.2, 0.3, 0.45, 0.6, 0.8)),
    "contention": Tried(values=(1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0)),
    "computation_taken": Tried(values=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0), ratio=False),
}
"""What is tried of each default that predictions depend on."""


def as_shipped(
    inputs: RowInputs, defaults: Sequence[Default] = DEFAULTS, widths: Sequence[IntervalWidth] = WIDTHS
) -> RowInputs:
    """Return the inputs with ``defaults`` for what a case leaves open: as shipped, those of ``dpsim predict``."""
    machine = with_defaults(inputs.workload, inputs.machine, defaults, widths)
    return replace(inputs, machine=machine)


def filling(assumed: Sequence[Default]) -> Fill:
    """Return what puts these defaults, and no widths, into the inputs of a row."""
    return functools.partial(as_shipped, defaults=tuple(assumed), widths=())


NOBODY = ""
"""Stands for a cluster that nobody has seen: what all clusters imply is assumed of it."""


def of_other_clusters(
    cases: Iterable[Case],
    sets: Mapping[str, PublishedSet],
    defaults: Sequence[Default] = DEFAULTS,
    *,
    executor: Executor | None = None,
) -> dict[str, tuple[Default, ...]]:
    """Return for each cluster with steps, and for ``NOBODY``, what the others imply of each default, with its doubt.

    A cluster implies a range of values: those with which its sets are predicted best. Its misfit with a value is the
    mean |log(predicted / published)| over all rows that its cases judge. A cluster takes the value that is nearest to
    the ranges of the others (the sum of the distances; of several values the middle one), and as its doubt the root
    mean square of these distances; it takes none where no other cluster tells. Each default is estimated beside those
    before it.
    """
    steps = [case for case in cases if case.quantity == "step"]
    by_cluster = grouped(steps, lambda case: sets[case.dataset].provenance.cluster)
    estimated: dict[str, tuple[Default, ...]] = dict.fromkeys((*by_cluster, NOBODY), ())
    tried = [default for default in defaults if default.field in TRIED]
    for default in (*tried, *tried[:1]):
        of_default = functools.partial(_implied, sets, default)
        before = [estimated[name] for name in by_cluster]
        implied_ranges = (executor.map if executor else map)(of_default, by_cluster.values(), before)
        ranges = dict(zip(by_cluster, implied_ranges, strict=True))
        for name in estimated:
            others = [implied for other, implied in ranges.items() if other != name and implied is not None]
            if others:
                value, doubt = _nearest(TRIED[default.field], others)
                before_it = [each for each in estimated[name] if each.field != default.field]
                estimated[name] = (*before_it, replace(default, value=value, doubt=doubt))
    return estimated


def _nearest(tried: Tried, ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the value nearest to all ranges, and the root mean square of its distances to them."""
    lows, highs = np.array(ranges).T

    def distances(value: float) -> Floats:
        return np.maximum(np.maximum(tried.away(lows, value), -tried.away(highs, value)), 0.0)

    sums = [float(distances(value).sum()) for value in tried.values]
    nearest = [value for value, each in zip(tried.values, sums, strict=True) if each <= min(sums) + 1e-9]
    value = float(np.median(nearest))
    return value, float(np.sqrt(np.mean(distances(value) ** 2)))


def _implied(
    sets: Mapping[str, PublishedSet], default: Default, cases: Sequence[Case], before: Sequence[Default]
) -> tuple[float, float] | None:
    """Return from where to where the tried values predict the cases of a cluster best.

    ``None`` where all are alike, and where the largest one is among the best: then something else that its sets do not
    state makes its steps longer.
    """

    @functools.cache
    def misfit(value: float) -> float:
        fill, errors = filling((*before, replace(default, value=value, doubt=0.0))), list[float]()
        for case in cases:
            published = sets[case.dataset]
            for part in parts(case, published, undivided=True):
                inputs = fitted_step_inputs(part, sets, fill)
                for row in part.judged:
                    own = inputs[row.line]
                    errors.append(abs(math.log(own.step_s() / outcome_s(row, published, own.plan))))
        return float(np.mean(errors))

    tried = TRIED[default.field].values
    if np.ptp([misfit(value) for value in (tried[0], tried[len(tried) // 2], tried[-1])]) == 0:
        return None
    least = min(map(misfit, tried))
    best = [value for value in tried if misfit(value) <= least + _ALIKE]
    return None if tried[-1] in best else (best[0], best[-1])


def widened_by_others(rows: Sequence[JudgedRow]) -> list[JudgedRow]:
    """Return the rows with intervals as wide as the other clusters' rows of the same quantity say."""
    widths = {
        (quantity, cluster): widths_by_cell([r for r in rows if r.quantity == quantity and r.cluster != cluster])
        for quantity, cluster in dict.fromkeys((row.quantity, row.cluster) for row in rows)
    }

    def factor(row: JudgedRow) -> float:
        of_others = widths[row.quantity, row.cluster]
        return (
            of_others[row.cell].factor
            if row.cell in of_others
            else max((width.factor for width in of_others.values()), default=1.0)
        )

    return [_widened(row, factor(row)) for row in rows]


def widened_as_shipped(rows: Sequence[JudgedRow]) -> list[JudgedRow]:
    """Return the rows, collectives with intervals as wide as dpsim's are; those of steps are so already."""
    factors = {width.group: width.factor for width in WIDTHS}
    return [_widened(row, factors[row.cell]) if row.quantity == "collective" else row for row in rows]


def _widened(row: JudgedRow, factor: float) -> JudgedRow:
    """Return a row with an interval so many times as wide, in logarithms."""
    ends = (("low", row.low), ("high", row.high))
    widened = {name: row.predicted * math.exp(factor * math.log(end / row.predicted)) for name, end in ends}
    return row.replaced(**widened)
