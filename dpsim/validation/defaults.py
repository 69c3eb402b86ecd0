"""Inputs that published machines leave open: what the other sets say of each, in place of a default."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dpsim.grouping import grouped
from dpsim.model.defaults import DEFAULTS, Default, with_defaults
from dpsim.model.residuals import LEVEL, covering_factor, ratio
from dpsim.validation.case import Case, parts
from dpsim.validation.inputs import Fill, RowInputs, fitted_step_inputs, outcome_s
from dpsim.validation.judge import JudgedRow
from dpsim.validation.published import PublishedSet

Floats = NDArray[np.float64]
COLLECTIVE_WIDTH = 0.72
"""How many times as wide as the model's own the intervals of published collectives must be, by all sets together."""
_ALIKE = 1e-3
"""Mean misfits that differ by no more are as good as each other."""
TRIED: Mapping[str, tuple[float, ...]] = {
    "compute_slowdown": (1.0, 1.02, 1.04, 1.06, 1.08, 1.1, 1.13, 1.16, 1.2, 1.3, 1.5),
    "fixed_share": (0.01, 0.03, 0.05, 0.07, 0.09, 0.12, 0.16, 0.2, 0.3),
    "contention": (1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0),
}
"""The values that are tried on a set, of each default that predictions depend on."""


def as_shipped(inputs: RowInputs, defaults: Sequence[Default] = DEFAULTS) -> RowInputs:
    """Return the inputs with ``defaults`` for what a case leaves open: as shipped, those of ``dpsim predict``."""
    machine = with_defaults(inputs.workload, inputs.machine, [inputs.plan.devices], defaults)
    return replace(inputs, machine=machine)


def filling(assumed: Sequence[Default]) -> Fill:
    """Return what puts these defaults into the inputs of a row."""
    return functools.partial(as_shipped, defaults=tuple(assumed))


def of_other_sets(
    cases: Iterable[Case], sets: Mapping[str, PublishedSet], defaults: Sequence[Default] = DEFAULTS
) -> dict[str, tuple[Default, ...]]:
    """Return for each set of steps what the other sets imply of each default, with its doubt.

    A set implies a range of values: those with which it is predicted best. Its misfit with a value is the mean
    |log(predicted / published)| over all its rows that its cases judge. A set takes the value that is nearest to the
    ranges of the others (the sum of the distances of logarithms; of several values the middle one), and as its doubt
    the root mean square of these distances; it takes none where no other set tells. Each default is estimated beside
    those before it.
    """
    by_set = grouped((case for case in cases if case.quantity == "step"), lambda case: case.dataset)
    estimated: dict[str, tuple[Default, ...]] = dict.fromkeys(by_set, ())
    for default in (each for each in defaults if each.field in TRIED):
        ranges = {name: _implied(of_set, sets, estimated[name], default) for name, of_set in by_set.items()}
        for name in by_set:
            others = [of_set for other, of_set in ranges.items() if other != name and of_set is not None]
            if others:
                value, doubt = _nearest(TRIED[default.field], others)
                estimated[name] = (*estimated[name], replace(default, value=value, doubt=doubt))
    return estimated


def _nearest(tried: Sequence[float], ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the value nearest to all ranges, and the root mean square of its distances to them, in logarithms."""

    def distances(value: float) -> Floats:
        away: Floats = np.maximum(np.log([low / value for low, _ in ranges]), np.log([value / up for _, up in ranges]))
        return np.maximum(away, 0.0)

    sums = [float(distances(value).sum()) for value in tried]
    nearest = [value for value, each in zip(tried, sums, strict=True) if each <= min(sums) + 1e-9]
    value = float(np.median(nearest))
    return value, float(np.sqrt(np.mean(distances(value) ** 2)))


def _implied(
    cases: Sequence[Case], sets: Mapping[str, PublishedSet], before: Sequence[Default], default: Default
) -> tuple[float, float] | None:
    """Return from where to where the tried values predict the cases of a set best.

    ``None`` where all are alike, and where the largest one is among the best: then something else that the set does not
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

    tried = TRIED[default.field]
    if np.ptp([misfit(value) for value in (tried[0], tried[len(tried) // 2], tried[-1])]) == 0:
        return None
    least = min(map(misfit, tried))
    best = [value for value in tried if misfit(value) <= least + _ALIKE]
    return None if tried[-1] in best else (best[0], best[-1])


def widths_of_other_sets(rows: Sequence[JudgedRow]) -> dict[tuple[str, str], float]:
    """Return for each (quantity, set) how many times as wide as the model's own the intervals of the others must be.

    They then hold 90 % of the rows of the same quantity, every set weighing the same. A set that is alone has none.
    """
    ratios = {
        key: [ratio(row.measured, row.predicted, row.low, row.high) for row in of_set]
        for key, of_set in grouped(rows, lambda row: (row.quantity, row.dataset)).items()
    }
    widths = {}
    for quantity, name in ratios:
        others = [of_set for (kind, other), of_set in ratios.items() if kind == quantity and other != name]
        if others:
            widths[quantity, name] = covering_factor(others, LEVEL)
    return widths


def widened(rows: Sequence[JudgedRow], factors: Mapping[tuple[str, str], float]) -> list[JudgedRow]:
    """Return the rows with intervals so many times as wide, in logarithms: factors by (quantity, set), 1 for others."""

    def ends(row: JudgedRow) -> dict[str, float]:
        factor, predicted = factors.get((row.quantity, row.dataset), 1.0), row.predicted
        return {
            name: predicted * math.exp(factor * math.log(end / predicted))
            for name, end in (("low", row.low), ("high", row.high))
        }

    return [row.replaced(**ends(row)) for row in rows]
